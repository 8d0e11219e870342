"""What operators look at: health, readiness, metrics, the log, and the end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from services.gateway import gather, probe
from shared.messages import (
    Abort,
    Credit,
    Failure,
    Generate,
    Refused,
)
from shared.types import FinishReason, ServiceName
from tests.services.gateway.scripted_mesh import (
    CREDIT,
    ScriptedMesh,
    background,
    events_of,
    until,
    wait_ready,
)

SERVICES = [
    ServiceName.TOKENIZER,
    ServiceName.SCHEDULER,
    ServiceName.DETOKENIZER,
    ServiceName.MODEL_EXECUTOR,
]


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, **body})


async def until_status(client: httpx.AsyncClient, path: str, status: int) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (response := await client.get(path)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    body: dict[str, Any] = response.json()
    return body


# --- readiness


async def test_ready_only_after_a_token_came_through(mesh: ScriptedMesh, tiny_model: Path) -> None:
    mesh.answer_probes = False
    url = await mesh.start_gateway(tiny_model)
    async with httpx.AsyncClient(base_url=url) as client:
        for path in ("/ready", "/v1/completions"):
            response = await client.request(
                "GET" if path == "/ready" else "POST", path, json={"prompt": "x"}
            )
            assert response.status_code == 503
            assert "tokenizer" in response.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200
        await mesh.start_all()
        await until(lambda: bool(mesh.probes))
        assert (await client.get("/ready")).status_code == 503
        mesh.answer(mesh.probes[0])
        assert await until_status(client, "/ready", 200) == {"ready": True, "absent": []}
        assert len(mesh.probes) == 1
        assert mesh.probes[0].params.max_tokens == 1


async def test_no_probe_without_an_executor(mesh: ScriptedMesh, tiny_model: Path) -> None:
    await mesh.start_gateway(tiny_model)
    mesh.tokenizer = await mesh.start(ServiceName.TOKENIZER)
    mesh.scheduler = await mesh.start(ServiceName.SCHEDULER)
    mesh.detokenizer = await mesh.start(ServiceName.DETOKENIZER)
    for peer in (mesh.tokenizer, mesh.scheduler, mesh.detokenizer):
        await mesh.met(peer)
    mesh.scheduler.tell(Credit(max_num_seqs=0, max_queue=9, running=0, waiting=0))
    await mesh.met(await mesh.start(ServiceName.TOKENIZER, index=1))
    assert mesh.probes == []
    mesh.scheduler.tell(CREDIT)
    await until(lambda: len(mesh.probes) == 1)


async def test_a_refused_probe_is_repeated(mesh: ScriptedMesh, tiny_model: Path) -> None:
    mesh.answer_probes = False
    url = await mesh.start_gateway(tiny_model)
    await mesh.start_all()
    await until(lambda: len(mesh.probes) == 1)
    mesh.answer_probes = True
    refused = Refused(mesh.probes[0].request_id, Failure(503, "not yet"))
    mesh.tokenizer.tell(refused)
    async with httpx.AsyncClient(base_url=url) as client:
        await wait_ready(client)
    assert len(mesh.probes) == 2


async def test_a_probe_without_answer_is_aborted_and_repeated(
    mesh: ScriptedMesh, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.05)
    mesh.answer_probes = False
    await mesh.start_gateway(tiny_model)
    await mesh.start_all()
    await until(lambda: len(mesh.probes) >= 2)
    assert (await mesh.scheduler.hear(Abort)).request_id == mesh.probes[0].request_id


@pytest.mark.parametrize("service", SERVICES)
async def test_a_lost_service_shows_until_it_is_back(
    mesh: ScriptedMesh, client: httpx.AsyncClient, service: ServiceName
) -> None:
    peers = {peer.mesh.identity.service: peer for peer in mesh.peers}
    await mesh.kill(peers[service])
    health = await until_status(client, "/health", 503)
    assert health["missing"] == [service]
    assert service in health["error"]["message"]
    assert (await client.get("/ready")).status_code == 503
    probes = len(mesh.probes)
    again = await mesh.start(service)
    mesh.adopt(again)
    await mesh.met(again)
    if service is ServiceName.SCHEDULER:
        again.tell(CREDIT)
    await until_status(client, "/health", 200)
    await until_status(client, "/ready", 200)
    assert len(mesh.probes) == probes + 1


# --- metrics


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


TWO = "# TYPE headrace_x_total counter\nheadrace_x_total 2.0\n"


async def test_metrics_are_there_from_the_first_scrape(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    for peer in mesh.peers:
        peer.answer_metrics = ""
    found = await metrics(client)
    for reason in ("stop", "length", "abort", "error"):
        assert found[f"headrace_request_success_total {reason}"] == 0  # the probe does not count
    for name in (
        "headrace_time_to_first_token_seconds_count",
        "headrace_inter_token_latency_seconds_count",
        "headrace_e2e_request_latency_seconds_count",
        "headrace_request_refused_total 429",
    ):
        assert found[name] == 0
    assert found["headrace_process_cpu_seconds_total gateway.0 gateway"] > 0


async def test_metrics_count_what_happened(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    mesh.autopilot = True
    for peer in mesh.peers:
        peer.answer_metrics = ""
    await complete(client, n=3, max_tokens=5)
    await complete(client, temperature=9)
    found = await metrics(client)
    assert found["headrace_request_success_total length"] == 3
    assert found["headrace_e2e_request_latency_seconds_count"] == 3
    assert found["headrace_time_to_first_token_seconds_count"] == 3
    assert found["headrace_inter_token_latency_seconds_count"] == 12
    assert found["headrace_request_refused_total 400"] == 1


async def test_metrics_of_all_services_are_summed(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    for peer in mesh.peers:
        peer.answer_metrics = TWO
    assert (await metrics(client))["headrace_x_total"] == 2 * len(mesh.peers)


async def test_a_late_service_does_not_hold_up_the_page(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last answer stands in for it, so that no counter falls; it is left out before that."""
    monkeypatch.setattr(gather, "REPLY_SECONDS", 0.2)
    silent, *others = mesh.peers
    for peer in others:
        peer.answer_metrics = TWO
    first = await metrics(client)
    assert first["headrace_x_total"] == 2 * len(others)
    silent.answer_metrics = TWO
    second = await metrics(client)
    assert second["headrace_gateway_unanswered_scrapes_total"] == 1
    assert second["headrace_x_total"] == 2 * len(mesh.peers)
    silent.answer_metrics = None
    assert (await metrics(client))["headrace_x_total"] == 2 * len(mesh.peers)


async def test_every_gateway_shows_all(
    mesh: ScriptedMesh, client: httpx.AsyncClient, tiny_model: Path
) -> None:
    mesh.autopilot = True
    for peer in mesh.peers:
        peer.answer_metrics = ""
    url = await mesh.start_gateway(tiny_model, index=1)
    for peer in mesh.peers:
        await mesh.met(peer, gateway=1)
    mesh.scheduler.tell(CREDIT, "gateway.1")
    async with httpx.AsyncClient(base_url=url) as second:
        await wait_ready(second)
        await until(lambda: all(one.mesh.peers(ServiceName.GATEWAY) for one in mesh.gateways))
        for number in range(1, 7):
            await complete(client if number % 2 else second)
            counts = [
                (await metrics(one))["headrace_request_success_total length"]
                for one in (client, second)
            ]
            assert counts == [number, number]
        assert (await second.get("/health")).json()["missing"] == []


# --- the log


async def test_one_line_for_each_request(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    mesh.autopilot = True
    with capture_logs() as lines:
        headers = {"x-request-id": "mine"}
        body = {"prompt": "SECRET", "max_tokens": 2, "frobnicate": 1}
        await client.post("/v1/completions", json=body, headers=headers)
        await complete(client, prompt="SECRET", temperature=9)
    debug, done, refused = lines
    assert debug["fields"] == ["frobnicate"]
    assert done["event"] == "request"
    assert done["request_id"] == "mine"
    assert (done["status"], done["finish"], done["stream"]) == (200, {"length": 1}, False)
    assert (done["prompt_tokens"], done["completion_tokens"]) == (3, 2)
    assert 0 < done["first_token_seconds"] <= done["seconds"]
    assert "aborted" not in done
    assert (refused["status"], refused["param"]) == (400, "temperature")
    assert "SECRET" not in str(lines)


async def test_aborts_are_logged_once_with_their_reason(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    with capture_logs() as lines:
        async with background(complete(client, n=2)):
            await mesh.tokenizer.hear(Generate)
        await until(lambda: not mesh.gateways[0].busy)
        async with background(complete(client)) as answering:
            request = await mesh.tokenizer.hear(Generate)
            mesh.accept(request)
            mesh.fail(request, Failure(500, "poison"))
            assert (await answering).status_code == 500
    assert [line["aborted"] for line in lines] == ["client closed", "server"]
    assert lines[1]["error"] == "poison"


async def test_a_fault_of_our_own_is_a_500(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client learns nothing of it but that; the log everything."""

    def broken(*anything: object) -> None:
        raise RuntimeError("SECRET")

    monkeypatch.setattr("services.gateway.parts.Parts.take_off", broken)
    with capture_logs() as lines:
        response = await complete(client)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "SECRET" not in response.text
    assert response.headers["x-request-id"]
    assert any(line["log_level"] == "error" and line["exc_info"] for line in lines)


# --- the end


async def test_a_drain_lets_answers_finish(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    gateway = mesh.gateways[0]
    async with background(complete(client, stream=True)) as answering:
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request)
        await until(lambda: gateway.busy)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: gateway.draining)
        async with httpx.AsyncClient(base_url=client.base_url) as others:
            response = await complete(others)
            assert response.status_code == 503
            assert response.headers["connection"] == "close"
            assert (await others.get("/ready")).status_code == 503
            assert (await others.get("/health")).status_code == 200
        assert not mesh.ended()
        mesh.delta(request, "the end", FinishReason.STOP)
        assert '"the end"' in (await answering).text
    await until(mesh.ended)
    with pytest.raises(httpx.ConnectError):
        await client.get("/health")


async def test_a_drain_that_takes_too_long_ends_with_an_error(
    mesh: ScriptedMesh, tiny_model: Path
) -> None:
    url = await mesh.start_gateway(tiny_model, drain_timeout=0.1)
    await mesh.start_all()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await wait_ready(client)
        async with background(complete(client, stream=True)) as answering:
            request = await mesh.tokenizer.hear(Generate)
            mesh.accept(request)
            mesh.delta(request, "half an ans")
            os.kill(os.getpid(), signal.SIGTERM)
            *_, error = events_of((await answering).text)
            assert "shutting down" in error["error"]["message"]
    await until(mesh.ended)


async def test_a_drain_closes_idle_connections(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    port = client.base_url.port
    assert port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with background(complete(client)) as answering:
        request = await mesh.tokenizer.hear(Generate)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(reader.read(-1), 20)
        writer.close()
        mesh.answer(request)
        assert (await answering).status_code == 200
    await until(mesh.ended)

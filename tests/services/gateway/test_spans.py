"""What a collector of OpenTelemetry traces hears of requests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from structlog.testing import capture_logs

from shared.messages import Abort, Admitted, Generate
from shared.types import FinishReason
from tests.services.gateway.scripted_mesh import (
    PATIENCE,
    ScriptedMesh,
    background,
    until,
    wait_ready,
)

PATH = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
CLOCKS_DIFFER = 50_000_000  # ns that a client's clock may seem to differ


class Collector:
    """Takes OTLP over HTTP, as the real ones do."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            pairs = resource.resource.attributes
            self.resource = {pair.key: pair.value.string_value for pair in pairs}
            for scope in resource.scope_spans:
                self._spans += scope.spans
        return web.Response()

    async def spans(self, count: int) -> dict[str, Span]:
        """So many new spans by their names, once they are here."""
        async with asyncio.timeout(PATIENCE):
            while len(self._spans) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        found, self._spans = self._spans, []
        assert len(found) == count
        return {span.name: span for span in found}


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # ms
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield collector
    await runner.cleanup()


@asynccontextmanager
async def gateway(
    mesh: ScriptedMesh, model: Path, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    url = await mesh.start_gateway(model, **settings)
    await mesh.start_all()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await wait_ready(client)
        yield client


def attributes(span: Span) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(one) for one in value.array_value.values]
        return getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in span.attributes}


async def test_a_request_and_its_phases(
    mesh: ScriptedMesh, tiny_model: Path, collector: Collector
) -> None:
    """R119: the span begins with the HTTP request, in the client's trace."""
    async with gateway(mesh, tiny_model, otlp_traces_endpoint=collector.url) as client:
        sent = time.time_ns()
        body = {"prompt": "hi", "max_tokens": 2, "temperature": 0.5, "stream": True}
        async with background(client.post(PATH, json=body, headers=TRACED)) as answering:
            request = await mesh.tokenizer.hear(Generate)
            (sequence,) = mesh.gateways[0]._flights._sequences.values()
            mesh.accept(request)
            await until(lambda: sequence.flight.accepted_at is not None)
            mesh.scheduler.tell(Admitted(request.request_id, 2))
            await until(lambda: sequence.flight.admitted_at is not None)
            mesh.delta(request, "one")
            mesh.delta(request, " two", FinishReason.LENGTH)
            assert (await answering).status_code == 200
        answered = time.time_ns()
        spans = await collector.spans(5)
    whole = spans.pop("llm_request")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert whole.kind == Span.SPAN_KIND_SERVER
    assert sent - CLOCKS_DIFFER <= whole.start_time_unix_nano
    assert whole.end_time_unix_nano <= answered + CLOCKS_DIFFER
    phases = [spans[name] for name in ("tokenize", "queue", "prefill", "decode")]
    assert all(span.parent_span_id == whole.span_id for span in phases)
    assert all(span.trace_id == whole.trace_id for span in phases)
    ends = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in phases]
    times = [time for both in ends for time in both]
    assert times == sorted(times)
    assert times[0] == whole.start_time_unix_nano and times[-1] <= whole.end_time_unix_nano
    assert times[1:-1:2] == times[2::2]  # each begins where the one before ends
    told = attributes(whole)
    latencies = {
        name.removeprefix("gen_ai.latency."): told.pop(name)
        for name in list(told)
        if name.startswith("gen_ai.latency.")
    }
    assert told == {
        "url.path": PATH,
        "http.response.status_code": 200,
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert latencies.keys() == {
        *("e2e", "time_to_first_token", "time_in_queue"),
        *("time_in_model_prefill", "time_in_model_decode"),
    }
    assert 0 < latencies["time_in_queue"] < latencies["time_to_first_token"] < latencies["e2e"]
    assert collector.resource["service.name"] == "headrace"


async def test_requests_that_do_not_end_well(
    mesh: ScriptedMesh, tiny_model: Path, collector: Collector
) -> None:
    async with gateway(mesh, tiny_model, otlp_traces_endpoint=collector.url) as client:
        assert (await client.post(PATH, json={"prompt": 5})).status_code == 400
        refused = (await collector.spans(1))["llm_request"]
        async with background(client.post(PATH, json={"prompt": "hi"})):
            await mesh.tokenizer.hear(Generate)
        await mesh.scheduler.hear(Abort)
        left = (await collector.spans(1))["llm_request"]
    assert refused.status.code == left.status.code == refused.status.STATUS_CODE_ERROR
    assert "prompt" in refused.status.message
    assert left.status.message == "client closed"
    assert attributes(refused)["http.response.status_code"] == 400
    assert not refused.parent_span_id
    assert refused.trace_id != left.trace_id


async def test_traces_that_are_not_sampled_are_not_sent(
    mesh: ScriptedMesh, tiny_model: Path, collector: Collector
) -> None:
    mesh.autopilot = True
    async with gateway(mesh, tiny_model, otlp_traces_endpoint=collector.url) as client:
        for header in (f"00-{TRACE}-{PARENT}-00", "nonsense"):
            headers = {"traceparent": header}
            answer = await client.post(PATH, json={"prompt": "hi"}, headers=headers)
            assert answer.status_code == 200
        spans = await collector.spans(3)
    # When it was admitted was not told here.
    assert spans.keys() == {"llm_request", "tokenize", "decode"}
    assert spans["llm_request"].trace_id.hex() != TRACE


async def test_a_collector_that_is_not_there_disturbs_nobody(
    mesh: ScriptedMesh, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    mesh.autopilot = True
    nowhere = "http://127.0.0.1:9/v1/traces"
    with capture_logs() as lines:
        async with gateway(mesh, tiny_model, otlp_traces_endpoint=nowhere) as client:
            for _ in range(20):
                answer = await client.post(PATH, json={"prompt": "hi"}, headers=TRACED)
                assert answer.status_code == 200
            assert (await client.get("/health")).status_code == 200
    assert not [line for line in lines if line["log_level"] == "error"]


async def test_without_a_collector_the_header_is_ignored(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    """R119"""
    mesh.autopilot = True
    answer = await client.post(PATH, json={"prompt": "hi"}, headers=TRACED)
    assert answer.status_code == 200


def test_nothing_is_imported_for_nothing() -> None:
    program = (
        "import sys, services.gateway.service\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True)

"""What becomes of requests when a service is lost."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from services.gateway import flights
from shared.messages import Abort, Admitted, Decode, Encode, Encoded, Generate
from shared.types import ServiceName, int32s
from tests.services.gateway.scripted_mesh import (
    CREDIT,
    Peer,
    ScriptedMesh,
    background,
    events_of,
    until,
)

TOKENIZER, SCHEDULER, DETOKENIZER = (
    ServiceName.TOKENIZER,
    ServiceName.SCHEDULER,
    ServiceName.DETOKENIZER,
)


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, **body})


async def another(mesh: ScriptedMesh, service: ServiceName) -> Peer:
    peer = await mesh.start(service, index=1)
    await mesh.met(peer)
    return peer


async def test_a_lost_tokenizers_requests_go_to_another(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(complete(client, n=2)) as answering:
        first = await mesh.tokenizer.hear(Generate)
        spare = await another(mesh, TOKENIZER)
        await mesh.kill(mesh.tokenizer)
        again = await spare.hear(Generate)
        assert (again.prompt, again.params) == (first.prompt, first.params)
        # The first may have got as far as a scheduler: it is not to run twice.
        assert (await mesh.scheduler.hear(Abort)).request_id == first.request_id
        assert again.request_id != first.request_id
        mesh.answer(first)  # late, and nobody's
        mesh.answer(again)
        mesh.answer(await spare.hear(Generate))
        assert len((await answering).json()["choices"]) == 2


async def test_what_was_cached_for_a_lost_launch_does_not_count(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(complete(client)) as answering:
        first = await mesh.tokenizer.hear(Generate)
        spare = await another(mesh, TOKENIZER)
        mesh.scheduler.tell(Admitted(first.request_id, 2))
        await until(lambda: mesh.choices()[0].cached_tokens == 2)
        await mesh.kill(mesh.tokenizer)
        again = await spare.hear(Generate)
        assert again.request_id != first.request_id
        mesh.answer(again)
        usage = (await answering).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_request_waits_for_a_tokenizer(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(complete(client)) as answering:
        await mesh.tokenizer.hear(Generate)
        await mesh.kill(mesh.tokenizer)
        await until(lambda: not mesh.gateways[0].mesh.peers(TOKENIZER))
        spare = await another(mesh, TOKENIZER)
        mesh.answer(await spare.hear(Generate))
        assert (await answering).status_code == 200


async def test_but_not_for_ever(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "TOKENIZER_WAIT_SECONDS", 0.05)
    async with background(complete(client)) as answering:
        await mesh.tokenizer.hear(Generate)
        await mesh.kill(mesh.tokenizer)
        response = await answering
        assert (response.status_code, response.json()["error"]["code"]) == (
            503,
            "service_unavailable",
        )


async def test_a_prompt_that_kills_tokenizers_is_given_up(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(complete(client, n=2)) as answering:
        await mesh.tokenizer.hear(Generate)
        victim = mesh.tokenizer
        for index in range(1, flights.MAX_LAUNCHES):
            spare = await mesh.start(TOKENIZER, index)
            await mesh.met(spare)
            await mesh.kill(victim)
            await spare.hear(Generate)
            victim = spare
        await mesh.kill(victim)
        response = await answering
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


def token_since(mesh: ScriptedMesh, began: float) -> bool:
    age = mesh.gateways[0].seconds_since_last_token
    return age is not None and age < time.perf_counter() - began


@pytest.mark.parametrize("service", [SCHEDULER, DETOKENIZER])
@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_went_through_a_lost_service_end(
    mesh: ScriptedMesh, client: httpx.AsyncClient, service: ServiceName, stream: bool
) -> None:
    """R025: no stream ends as if it were complete."""
    lost = mesh.scheduler if service is SCHEDULER else mesh.detokenizer
    left = mesh.detokenizer if service is SCHEDULER else mesh.scheduler
    async with background(complete(client, prompt=["a", "b"], stream=stream)) as answering:
        requests = [await mesh.tokenizer.hear(Generate) for _ in range(2)]
        for request in requests:
            mesh.accept(request)
        began = time.perf_counter()
        mesh.delta(requests[0], "x")
        await until(lambda: token_since(mesh, began))
        await mesh.kill(lost)
        response = await answering
        error = events_of(response.text)[-1] if stream else response.json()
        assert response.status_code == (200 if stream else 503)
        assert error["error"]["code"] == "service_unavailable"
        assert service in error["error"]["message"]
        aborted = {(await left.hear(Abort)).request_id for _ in range(2)}
        assert aborted == {request.request_id for request in requests}


@pytest.mark.parametrize("service", [SCHEDULER, DETOKENIZER])
async def test_unaccepted_requests_are_sent_again_while_there_is_a_way(
    mesh: ScriptedMesh, client: httpx.AsyncClient, service: ServiceName
) -> None:
    """Of a lost scheduler nobody knows whether it had the request."""
    async with background(complete(client)) as answering:
        first = await mesh.tokenizer.hear(Generate)
        spare = await another(mesh, service)
        if service is SCHEDULER:
            spare.tell(CREDIT)
            await mesh.kill(mesh.scheduler)
            mesh.scheduler = spare
        else:
            await mesh.kill(mesh.detokenizer)
            mesh.detokenizer = spare
        again = await mesh.tokenizer.hear(Generate)
        assert again.request_id != first.request_id
        assert again.route.detokenizer == mesh.detokenizer.mesh.identity.name
        mesh.answer(again)
        assert (await answering).status_code == 200


@pytest.mark.parametrize("service", [SCHEDULER, DETOKENIZER])
async def test_unaccepted_requests_end_when_there_is_none(
    mesh: ScriptedMesh, client: httpx.AsyncClient, service: ServiceName
) -> None:
    async with background(complete(client, n=2)) as answering:
        await mesh.tokenizer.hear(Generate)
        await mesh.kill(mesh.scheduler if service is SCHEDULER else mesh.detokenizer)
        assert (await answering).status_code == 503


async def test_others_go_on(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    """A loss ends only what went through the lost instance."""
    spare = await another(mesh, DETOKENIZER)
    names = {DETOKENIZER + ".0": mesh.detokenizer, DETOKENIZER + ".1": spare}
    async with background(complete(client, prompt=["x"] * 16)) as answering:
        requests = [await mesh.tokenizer.hear(Generate) for _ in range(16)]
        routes = [request.route.detokenizer for request in requests]
        assert set(routes) == set(names), "both shards have some"
        for request in requests:
            mesh.detokenizer = names[request.route.detokenizer]
            mesh.answer(request)
        assert (await answering).status_code == 200


async def test_questions_are_asked_again(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    asking = client.post("/tokenize", json={"prompt": "hi"})
    async with background(asking) as answering:
        await mesh.tokenizer.hear(Encode)
        spare = await another(mesh, TOKENIZER)
        await mesh.kill(mesh.tokenizer)
        question = await spare.hear(Encode)
        spare.tell(Encoded(question.request_id, int32s([1, 2]), 99))
        assert (await answering).json()["tokens"] == [1, 2]


async def test_questions_without_a_tokenizer(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    async with background(client.post("/detokenize", json={"tokens": [1]})) as answering:
        await mesh.tokenizer.hear(Decode)
        await mesh.kill(mesh.tokenizer)
        response = await answering
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")

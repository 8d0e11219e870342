"""What becomes of requests when a service is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import flights, launches, questions
from shared.codec import Identity, encode
from shared.messages import (
    Abort,
    Accepted,
    Admitted,
    Decode,
    Decoded,
    Deltas,
    Encode,
    Encoded,
    Failure,
    Finished,
    Generate,
    Gone,
    Reopen,
)
from shared.types import FinishReason, Incarnation, RequestId, ServiceName, int32s
from tests.services.gateway.scripted_mesh import (
    CREDIT,
    Peer,
    ScriptedMesh,
    background,
    events_of,
    until,
)
from tests.shared.mesh_member import raw_push

TOKENIZER, SCHEDULER, DETOKENIZER = (
    ServiceName.TOKENIZER,
    ServiceName.SCHEDULER,
    ServiceName.DETOKENIZER,
)


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, **body})


async def another(mesh: ScriptedMesh, service: ServiceName) -> Peer:
    mesh.answer_probes = False  # by whom could they be?
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
    monkeypatch.setattr(launches, "WAIT_SECONDS", 0.05)
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
        for index in range(1, flights.MAX_TOKENIZERS_LOST):
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


async def accepted(mesh: ScriptedMesh, client: httpx.AsyncClient, text: str = "ab") -> Generate:
    """The next request, under way with its first token's text."""
    request = await mesh.tokenizer.hear(Generate)
    mesh.accept(request)
    began = time.perf_counter()
    mesh.delta(request, text)
    await until(lambda: token_since(mesh, began))
    return request


def replay(peer: Peer, request: Generate, scheduler: str = "scheduler.0") -> None:
    """Another detokenizer, or the same under another scheduler, goes on from the beginning."""
    ends = [Finished(request.request_id, FinishReason.LENGTH, 2)]
    ids = [request.request_id] * 2
    peer.tell(Accepted(request.request_id, 3, scheduler))
    peer.tell(Deltas(ids, ["ab", "cd"], int32s([0, 2]), int32s([1, 2]), ends))


async def test_a_lost_schedulers_requests_go_on(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    """Their detokenizer sees to it; nothing is aborted or sent again."""
    async with background(complete(client)) as answering:
        request = await accepted(mesh, client)
        await mesh.kill(mesh.scheduler)
        await until(lambda: not mesh.gateways[0].mesh.peers(SCHEDULER))
        replay(mesh.detokenizer, request, "scheduler.1")
        assert (await answering).json()["choices"][0]["text"] == "abcd"
        assert mesh.detokenizer.heard[Abort].empty()
        assert mesh.tokenizer.heard[Generate].empty()


async def test_a_lost_detokenizers_requests_go_on(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    """Their scheduler sees to it, and is asked to; what the client has is not told again."""
    spare = await another(mesh, DETOKENIZER)
    async with background(complete(client)) as answering:
        request = await mesh.tokenizer.hear(Generate)
        routed, other = mesh.detokenizer, spare
        if request.route.detokenizer == "detokenizer.1":
            routed, other = spare, mesh.detokenizer
        routed.tell(Accepted(request.request_id, 3, "scheduler.0"))
        routed.tell(Deltas([request.request_id], ["ab"], int32s([0]), int32s([1])))
        await until(lambda: mesh.choices()[0].received == 2)
        await mesh.kill(routed)
        asked = await mesh.scheduler.hear(Reopen)
        assert asked == Reopen(request.request_id, request.route.detokenizer)
        replay(other, request)
        assert (await answering).json()["choices"][0]["text"] == "abcd"


async def test_a_detokenizer_may_accept_when_it_is_dead(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway was told of its loss before that, and it will not be lost again."""
    monkeypatch.setattr(flights, "HEARSAY_SECONDS", 0.05)
    async with background(complete(client)) as answering:
        request = await mesh.tokenizer.hear(Generate)
        accepted = Accepted(request.request_id, 3, "scheduler.0")
        with raw_push(Path(mesh.directory), "gateway.0") as push:
            push.send(encode(accepted, Identity(DETOKENIZER, "detokenizer.7", Incarnation(1))))
            asked = await mesh.scheduler.hear(Reopen)
        assert asked == Reopen(request.request_id, "detokenizer.7")
        replay(mesh.detokenizer, request)
        assert (await answering).json()["choices"][0]["text"] == "abcd"


async def test_of_both_lost_the_request_is_launched_again(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(complete(client, stream=True)) as answering:
        first = await accepted(mesh, client)
        for service, lost in ((SCHEDULER, mesh.scheduler), (DETOKENIZER, mesh.detokenizer)):
            await mesh.kill(lost)
            mesh.adopt(await another(mesh, service))
        again = await mesh.tokenizer.hear(Generate)
        assert again.request_id != first.request_id
        assert (again.prompt, again.params) == (first.prompt, first.params)
        # Others may have got hold of the first: it is not to run twice.
        assert (await mesh.scheduler.hear(Abort)).request_id == first.request_id
        replay(mesh.detokenizer, again)
        events = events_of((await answering).text)[:-1]
        assert [event["choices"][0]["text"] for event in events] == ["ab", "cd"]


async def test_what_cannot_be_launched_again_ends_with_an_error(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R025: no stream ends as if it were complete."""
    monkeypatch.setattr(launches, "WAIT_SECONDS", 0.05)
    async with background(complete(client, stream=True)) as answering:
        await accepted(mesh, client)
        await mesh.kill(mesh.scheduler)
        await mesh.kill(mesh.detokenizer)
        text, error = events_of((await answering).text)
    assert text["choices"][0]["text"] == "ab"
    assert error["error"]["code"] == "service_unavailable"


async def test_what_the_scheduler_does_not_know_is_launched_again(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    """It had ended there, and its end did not reach the gateway through the lost detokenizer."""
    async with background(complete(client)) as answering:
        first = await accepted(mesh, client)
        await mesh.kill(mesh.detokenizer)
        mesh.scheduler.tell(Gone((await mesh.scheduler.hear(Reopen)).request_id))
        mesh.adopt(await another(mesh, DETOKENIZER))
        again = await mesh.tokenizer.hear(Generate)
        assert again.request_id != first.request_id
        replay(mesh.detokenizer, again)
        assert (await answering).json()["choices"][0]["text"] == "abcd"


async def test_a_request_that_nobody_goes_on_with_is_launched_again(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "PATIENCE_SECONDS", 0.05)
    async with background(complete(client)) as answering:
        first = await accepted(mesh, client)
        await mesh.kill(mesh.detokenizer)
        mesh.adopt(await another(mesh, DETOKENIZER))
        again = await mesh.tokenizer.hear(Generate)
        assert again.request_id != first.request_id
        assert (await mesh.scheduler.hear(Abort)).request_id == first.request_id
        replay(mesh.detokenizer, again)
        assert (await answering).status_code == 200


async def test_an_abort_finds_a_request_that_is_being_handed_on(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    """Nobody knows who has it: all are told, and whoever takes it later, too."""
    async with background(complete(client)):
        request = await accepted(mesh, client)
        await mesh.kill(mesh.scheduler)
        await until(lambda: not mesh.gateways[0].mesh.peers(SCHEDULER))
        successor = await another(mesh, SCHEDULER)
    assert (await mesh.detokenizer.hear(Abort)).request_id == request.request_id
    assert (await successor.hear(Abort)).request_id == request.request_id
    mesh.detokenizer.tell(Accepted(request.request_id, 3, "scheduler.1"))
    assert (await mesh.detokenizer.hear(Abort)).request_id == request.request_id
    assert (await successor.hear(Abort)).request_id == request.request_id


async def test_whoever_takes_what_is_not_wanted_is_told_once_it_is_linked(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    mesh.detokenizer.tell(Accepted(RequestId("stray"), 3, "scheduler.1"))
    assert (await mesh.detokenizer.hear(Abort)).request_id == "stray"
    later = await another(mesh, SCHEDULER)
    assert (await later.hear(Abort)).request_id == "stray"


async def test_a_former_detokenizer_is_told_and_its_failure_ends_nothing(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    """The scheduler had lost it, but the gateway has not."""
    spare = await another(mesh, DETOKENIZER)
    async with background(complete(client)) as answering:
        request = await mesh.tokenizer.hear(Generate)
        mesh.detokenizer.tell(Accepted(request.request_id, 3, "scheduler.0"))
        await until(lambda: mesh.choices()[0].accepted)
        spare.tell(Accepted(request.request_id, 3, "scheduler.0"))
        assert (await mesh.detokenizer.hear(Abort)).request_id == request.request_id
        failure = Finished(
            request.request_id, FinishReason.ERROR, 0, failure=Failure(503, "no scheduler")
        )
        mesh.detokenizer.tell(Deltas([], [], int32s(), int32s(), [failure]))
        mesh.detokenizer.tell(Accepted(RequestId("stray"), 3, "scheduler.0"))
        assert (await mesh.detokenizer.hear(Abort)).request_id == "stray"  # both are handled
        replay(spare, request)
        assert (await answering).json()["choices"][0]["text"] == "abcd"


async def test_what_was_sent_to_a_lost_scheduler_out_of_ignorance_is_launched_again(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer heard of the loss later than the gateway."""
    monkeypatch.setattr(flights, "HEARSAY_SECONDS", 0.2)
    spare = await another(mesh, SCHEDULER)
    spare.tell(CREDIT)
    await mesh.kill(mesh.scheduler)
    await until(lambda: mesh.gateways[0].mesh.peers(SCHEDULER) == ["scheduler.1"])
    mesh.adopt(spare)
    async with background(complete(client)) as answering:
        first = await mesh.tokenizer.hear(Generate)
        again = await mesh.tokenizer.hear(Generate)
        assert again.request_id != first.request_id
        mesh.answer(again)
        assert (await answering).status_code == 200


@pytest.mark.parametrize("service", [TOKENIZER, SCHEDULER, DETOKENIZER])
async def test_requests_that_come_during_an_outage_wait(
    mesh: ScriptedMesh, client: httpx.AsyncClient, service: ServiceName
) -> None:
    lost = {TOKENIZER: mesh.tokenizer, SCHEDULER: mesh.scheduler, DETOKENIZER: mesh.detokenizer}
    await mesh.kill(lost[service])
    await until(lambda: not mesh.gateways[0].mesh.peers(service))
    async with background(complete(client)) as answering:
        assert (await client.get("/health")).status_code == 503
        successor = await another(mesh, service)
        if service is SCHEDULER:
            successor.tell(CREDIT)
        mesh.adopt(successor)
        mesh.answer(await mesh.tokenizer.hear(Generate))
        assert (await answering).status_code == 200


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
async def test_unaccepted_requests_end_when_there_is_none_for_too_long(
    mesh: ScriptedMesh,
    client: httpx.AsyncClient,
    service: ServiceName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launches, "WAIT_SECONDS", 0.05)
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


async def test_questions_wait_for_a_tokenizer(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    await mesh.kill(mesh.tokenizer)
    await until(lambda: not mesh.gateways[0].mesh.peers(TOKENIZER))
    async with background(client.post("/detokenize", json={"tokens": [1]})) as answering:
        spare = await another(mesh, TOKENIZER)
        question = await spare.hear(Decode)
        spare.tell(Decoded(question.request_id, "a"))
        assert (await answering).json() == {"prompt": "a"}


async def test_questions_without_a_tokenizer(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ANSWER_SECONDS", 0.3)
    async with background(client.post("/detokenize", json={"tokens": [1]})) as answering:
        await mesh.tokenizer.hear(Decode)
        await mesh.kill(mesh.tokenizer)
        response = await answering
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")

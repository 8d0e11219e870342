"""Streams over a scripted mesh: events, errors in the middle, clients that leave or lag."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import pytest

from services.gateway import flights
from shared.messages import Abort, Deltas, Failure, Finished, Generate
from shared.types import FinishReason, int32s
from tests.services.gateway.scripted_mesh import (
    ScriptedMesh,
    background,
    events_of,
    until,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "stream": True},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "stream": True},
}


def chunk_schema(object_name: str, content: dict[str, Any]) -> dict[str, Any]:
    """What strict clients expect of every chunk."""
    finish = {"enum": [None, "stop", "length"]}
    choice = {
        "type": "object",
        "required": ["index", "finish_reason", *content],
        "properties": {
            "index": {"type": "integer"},
            "finish_reason": finish,
            "logprobs": {"type": "null"},
            "stop_reason": {"type": ["string", "integer", "null"]},
            **content,
        },
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": object_name},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": choice},
            "usage": {"type": ["object", "null"]},
        },
        "additionalProperties": False,
    }


DELTA = {
    "type": "object",
    "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
    "additionalProperties": False,
}
SCHEMAS = {
    COMPLETIONS: chunk_schema("text_completion", {"text": {"type": "string"}}),
    CHAT: chunk_schema("chat.completion.chunk", {"delta": DELTA}),
}


async def stream(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    response = await client.post(path, json={**BODIES[path], **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return events_of(response.text)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("usage", [False, True])
async def test_events(
    mesh: ScriptedMesh, client: httpx.AsyncClient, path: str, usage: bool
) -> None:
    mesh.autopilot = True
    options = {"stream_options": {"include_usage": True}} if usage else {}
    *chunks, done = await stream(client, path, max_tokens=4, seed=1, n=2, **options)
    assert done == "[DONE]"
    for chunk in chunks:
        jsonschema.validate(chunk, SCHEMAS[path])
        assert ("usage" in chunk) == usage
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 8,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + ["length"]
        assert text_of(mine) == f"seed{1 + index} word2 word3 word4"
        if path == CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in mine[1:])


def text_of(choices: list[dict[str, Any]]) -> str:
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
    )


@asynccontextmanager
async def streaming(
    mesh: ScriptedMesh, client: httpx.AsyncClient, **body: Any
) -> AsyncIterator[tuple[Generate, httpx.Response]]:
    """A stream that has begun, and its request as the mesh sees it."""
    asking = {**BODIES[COMPLETIONS], "max_tokens": 100, **body}
    async with (
        background(_accept_one(mesh)) as accepting,
        client.stream("POST", COMPLETIONS, json=asking) as response,
    ):
        assert response.status_code == 200
        yield await accepting, response


async def _accept_one(mesh: ScriptedMesh) -> Generate:
    request = await mesh.tokenizer.hear(Generate)
    mesh.accept(request)
    return request


async def test_text_comes_as_it_is_made(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    async with streaming(mesh, client) as (request, response):
        lines = response.aiter_lines()
        for piece in ("Hello", " wörld \u2028", "\x85\u0000 \U0001fae0", '"\\\n'):
            mesh.delta(request, piece)
            chunk = json.loads((await anext(lines)).removeprefix("data: "))
            assert chunk["choices"][0]["text"] == piece
            assert await anext(lines) == ""


async def test_repeated_text_is_skipped(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    """A shard that takes over may send again what its forerunner sent."""
    async with streaming(mesh, client) as (request, response):
        key = request.request_id
        for offset, text in ((0, "abc"), (0, "abcdef"), (2, "cd"), (6, "")):
            mesh.detokenizer.tell(Deltas([key], [text], int32s([offset]), int32s([1])))
        end = Finished(key, FinishReason.STOP, 2)
        mesh.detokenizer.tell(Deltas([key], ["fg"], int32s([5]), int32s([2]), [end]))
        await response.aread()
        choices = [event["choices"][0] for event in events_of(response.text)[:-1]]
        assert text_of(choices) == "abcdefg"


async def test_a_fault_in_the_middle(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    """One error event, then the end without [DONE]; what came before it is not lost."""
    async with streaming(mesh, client) as (request, response):
        mesh.delta(request, "Hello")
        failure = Failure(500, "it broke", code="internal_error")
        mesh.fail(request, failure)
        await response.aread()
    first, error = events_of(response.text)
    assert first["choices"][0]["text"] == "Hello"
    assert error == {
        "error": {
            "message": "it broke",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


async def test_a_gap_in_the_text_is_a_fault(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    async with streaming(mesh, client) as (request, response):
        key = request.request_id
        mesh.detokenizer.tell(Deltas([key], ["late"], int32s([3]), int32s([1])))
        await response.aread()
        assert events_of(response.text)[-1]["error"]["code"] == "internal_error"
        assert (await mesh.scheduler.hear(Abort)).request_id == key


@pytest.mark.parametrize("pieces", [0, 1, 5])
async def test_a_client_that_leaves_is_aborted(
    mesh: ScriptedMesh, client: httpx.AsyncClient, pieces: int
) -> None:
    async with streaming(mesh, client) as (request, response):
        lines = response.aiter_lines()
        for _ in range(pieces):
            mesh.delta(request, "x")
            await anext(lines)
    for peer in (mesh.scheduler, mesh.detokenizer):
        abort = await peer.hear(Abort)
        assert (abort.request_id, abort.reason) == (request.request_id, "client closed")
    assert mesh.tokenizer.heard[Abort].empty()
    assert not mesh.gateways[0].busy


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_before_acceptance(
    mesh: ScriptedMesh, client: httpx.AsyncClient, path: str, streamed: bool
) -> None:
    """All who may have the request by now are told, as nobody knows where it is."""
    async with background(client.post(path, json={**BODIES[path], "stream": streamed})):
        request = await mesh.tokenizer.hear(Generate)
    for peer in (mesh.tokenizer, mesh.scheduler, mesh.detokenizer):
        assert (await peer.hear(Abort)).request_id == request.request_id


async def test_a_client_that_leaves_a_whole_answer(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(client.post(COMPLETIONS, json={"prompt": "hi", "n": 2})):
        for _ in range(2):
            request = await _accept_one(mesh)
            mesh.delta(request, "x")
        await until(lambda: mesh.gateways[0].busy)
    aborted = {(await mesh.scheduler.hear(Abort)).request_id for _ in range(2)}
    assert request.request_id in aborted
    await until(lambda: not mesh.gateways[0].busy)


async def test_what_comes_after_the_end_is_dropped(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    mesh.autopilot = True
    async with streaming_until_left(mesh, client) as request:
        pass
    mesh.delta(request, "late", FinishReason.STOP)
    mesh.accept(request)
    assert (await stream(client, COMPLETIONS))[-1] == "[DONE]"


@asynccontextmanager
async def streaming_until_left(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> AsyncIterator[Generate]:
    mesh.autopilot = False
    async with streaming(mesh, client) as (request, _):
        yield request
    await mesh.scheduler.hear(Abort)
    mesh.autopilot = True


async def test_a_client_that_does_not_read(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is aborted past the bound, and meanwhile holds up nobody."""
    monkeypatch.setattr(flights, "MAX_LAG_CHARS", 100_000)
    host, port = str(client.base_url.host), client.base_url.port
    assert port is not None
    reader, writer = await asyncio.open_connection(host, port, limit=1024)
    body = json.dumps(BODIES[COMPLETIONS] | {"max_tokens": 10_000}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    request = await _accept_one(mesh)
    aborting = asyncio.create_task(mesh.scheduler.hear(Abort))
    while not aborting.done():
        mesh.delta(request, "x" * 40_000)
        await asyncio.sleep(0.001)  # time to write it, as long as there is room
    assert aborting.result().reason == "client too slow"
    mesh.autopilot = True
    assert (await stream(client, COMPLETIONS))[-1] == "[DONE]"
    text = await asyncio.wait_for(reader.read(-1), 20)  # it reads at last: the error is told
    assert b"client_too_slow" in text
    writer.close()


async def test_many_streams_at_once(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    mesh.autopilot = True
    answers = await asyncio.gather(
        *(stream(client, COMPLETIONS, seed=seed, max_tokens=20) for seed in range(16))
    )
    for seed, events in enumerate(answers):
        text = text_of([event["choices"][0] for event in events[:-1]])
        assert text == " ".join([f"seed{seed}", *(f"word{number}" for number in range(2, 21))])

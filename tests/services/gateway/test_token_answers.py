"""Answers that tell of tokens, over a scripted mesh: where each thing stands, streaming or not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.messages import Generate
from shared.types import FinishReason
from tests.services.gateway.details import Spoken, details
from tests.services.gateway.scripted_mesh import ScriptedMesh, background, events_of

CHAT = [{"role": "user", "content": "hi"}]
CONTINUED: dict[str, Any] = {
    "messages": [*CHAT, {"role": "assistant", "content": "1, 2,"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "hi"},
    "chat/completions": {"messages": CHAT},
}
PROMPT = [
    Spoken(1, b"p"),
    Spoken(2, b"q", 1, 1, [(2, b"q", -0.5), (2, b"q", -0.5)]),
]
OUTPUT = [Spoken(id, b" t", 0, 1, [(id, b" t", -float(id)), (id, b" t", -1.0)]) for id in (3, 4)]


async def speak(mesh: ScriptedMesh, request: Generate, prompt: bool) -> None:
    """Two tokens of text, and what is told of them."""
    mesh.accept(request, prompt_tokens=len(PROMPT))
    told = [details(PROMPT, 0, request.request_id)] if prompt else []
    for place, token in enumerate(OUTPUT):
        told.append(details([token], len(PROMPT) + place, request.request_id))
        end = FinishReason.LENGTH if token is OUTPUT[-1] else FinishReason.NONE
        mesh.delta(request, " t", end, details=told)
        told = []


async def ask(
    mesh: ScriptedMesh, client: httpx.AsyncClient, route: str, *, prompt: bool, **body: Any
) -> tuple[Generate, httpx.Response]:
    asking = client.post(f"/v1/{route}", json={**BODIES[route], "max_tokens": 2, **body})
    async with background(asking) as answering:
        request = await mesh.tokenizer.hear(Generate)
        await speak(mesh, request, prompt)
        return request, await answering


def joined(chunks: list[Any], *path: str) -> list[Any]:
    """What the chunks have of a list, put together."""
    found: list[Any] = []
    for chunk in chunks:
        for name in path:
            chunk = (chunk or {}).get(name)
        found += chunk or []
    return found


async def test_logprobs_of_completions(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    options: dict[str, Any] = {"logprobs": 1, "return_token_ids": True, "prompt": True}
    request, response = await ask(mesh, client, "completions", **options)
    assert (request.params.logprobs, request.params.return_token_ids) == (1, True)
    choice = response.json()["choices"][0]
    assert choice["text"] == " t t"
    assert choice["logprobs"] == {
        "tokens": [" t", " t"],
        "token_logprobs": [-3.0, -4.0],
        "top_logprobs": [{" t": -3.0}, {" t": -4.0}],
        "text_offset": [0, 0],
    }
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([3, 4], [1, 2])

    _, response = await ask(mesh, client, "completions", stream=True, **options)
    chunks = [event["choices"][0] for event in events_of(response.text)[:-1]]
    for name, values in choice["logprobs"].items():
        assert joined(chunks, "logprobs", name) == values
    assert joined(chunks, "token_ids") == [3, 4]
    assert chunks[0]["prompt_token_ids"] == [1, 2]
    assert "".join(chunk["text"] for chunk in chunks) == " t t"


async def test_logprobs_of_chats(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    options: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "prompt": True,
    }
    _, response = await ask(mesh, client, "chat/completions", **options)
    body = response.json()
    choice = body["choices"][0]
    entry = {"token": " t", "logprob": -3.0, "bytes": [32, 116]}
    first = entry | {"top_logprobs": [entry | {"logprob": -1.0}]}
    assert choice["logprobs"]["content"][0] == first
    assert choice["logprobs"]["refusal"] is None
    assert (choice["token_ids"], body["prompt_token_ids"]) == ([3, 4], [1, 2])

    _, response = await ask(mesh, client, "chat/completions", stream=True, **options)
    events = events_of(response.text)[:-1]
    chunks = [event["choices"][0] for event in events]
    assert joined(chunks, "logprobs", "content") == choice["logprobs"]["content"]
    assert joined(events, "prompt_token_ids") == [1, 2]
    assert joined(chunks, "token_ids") == [3, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(
    mesh: ScriptedMesh, client: httpx.AsyncClient, stream: bool
) -> None:
    """R029: the prompt's tokens first, and nothing of the first of them."""
    options: dict[str, Any] = {"logprobs": 0, "echo": True, "prompt": True, "stream": stream}
    request, response = await ask(mesh, client, "completions", **options)
    assert (request.params.echo, request.params.prompt_logprobs) == (True, 0)
    events = events_of(response.text)[:-1] if stream else [response.json()]
    chunks = [event["choices"][0] for event in events]
    assert joined(chunks, "logprobs", "tokens") == ["p", "q", " t", " t"]
    assert joined(chunks, "logprobs", "token_logprobs") == [None, -0.5, -3.0, -4.0]
    assert joined(chunks, "logprobs", "top_logprobs")[:2] == [None, {"q": -0.5}]


@pytest.mark.parametrize("route", BODIES)
async def test_logprobs_of_prompts(
    mesh: ScriptedMesh, client: httpx.AsyncClient, route: str
) -> None:
    _, response = await ask(mesh, client, route, prompt_logprobs=1, prompt=True)
    body = response.json()
    place = body["choices"][0] if route == "completions" else body
    told = {"logprob": -0.5, "rank": 1, "decoded_token": "q"}
    assert place["prompt_logprobs"] == [None, {"2": told}]
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("route", BODIES)
async def test_tokens_by_their_ids(
    mesh: ScriptedMesh, client: httpx.AsyncClient, route: str
) -> None:
    logprobs = 0 if route == "completions" else True
    options: dict[str, Any] = {
        "return_tokens_as_token_ids": True,
        "logprobs": logprobs,
        "prompt": False,
    }
    _, response = await ask(mesh, client, route, **options)
    told = response.json()["choices"][0]["logprobs"]
    names = told["tokens"] if route == "completions" else [one["token"] for one in told["content"]]
    assert names == ["token_id:3", "token_id:4"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_is_echoed(
    mesh: ScriptedMesh, client: httpx.AsyncClient, stream: bool
) -> None:
    """R110"""
    options: dict[str, Any] = {**CONTINUED, "echo": True, "stream": stream}
    _, response = await ask(mesh, client, "chat/completions", prompt=False, **options)
    if stream:
        events = events_of(response.text)[:-1]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "1, 2, t t"


async def test_only_an_assistants_message_is_echoed(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    _, response = await ask(mesh, client, "chat/completions", prompt=False, echo=True)
    assert response.json()["choices"][0]["message"]["content"] == " t t"


async def test_the_best_of_several(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    """The n likeliest by token, the best first; all are counted."""
    body = {"prompt": "hi", "n": 2, "best_of": 3, "seed": 5}
    async with background(client.post("/v1/completions", json=body)) as answering:
        # By seed: one token of -1.5, two of -1, three of -2 each.
        logprobs = {5: [-1.5], 6: [-1.0, -1.0], 7: [-2.0, -2.0, -2.0]}
        for _ in logprobs:
            request = await mesh.tokenizer.hear(Generate)
            assert request.params.logprobs == 0
            mesh.accept(request)
            for place, value in enumerate(logprobs[request.params.seed]):
                token = Spoken(1, b"x", 0, 1, [(1, b"x", value)])
                last = place + 1 == len(logprobs[request.params.seed])
                end = FinishReason.STOP if last else FinishReason.NONE
                told = [details([token], 3 + place, request.request_id)]
                mesh.delta(request, str(request.params.seed), end, details=told)
        answer = (await answering).json()
    assert [choice["text"] for choice in answer["choices"]] == ["66", "5"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 6)


@pytest.mark.parametrize("route", BODIES)
async def test_usage_in_all_events(
    mesh: ScriptedMesh, client: httpx.AsyncClient, route: str
) -> None:
    options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"stream": True, "stream_options": options, "prompt": False}
    _, response = await ask(mesh, client, route, **body)
    events = events_of(response.text)[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 2
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(PROMPT)}
    assert events[-1]["choices"] == []


@pytest.mark.parametrize(
    ("header", "field", "expected"),
    [("mine", None, "mine"), (None, "ours", "ours"), ("mine", "ours", "mine")],
)
async def test_names_of_requests(
    mesh: ScriptedMesh,
    client: httpx.AsyncClient,
    header: str | None,
    field: str | None,
    expected: str,
) -> None:
    """R104: the client's name is in the answer's id and header; the mesh has ids of its own."""
    mesh.autopilot = True
    headers = {"x-request-id": header} if header else {}
    for path, prefix in (("completions", "cmpl"), ("chat/completions", "chatcmpl")):
        body = {**BODIES[path], "request_id": field}
        response = await client.post(f"/v1/{path}", json=body, headers=headers)
        assert response.json()["id"] == f"{prefix}-{expected}"
        assert response.headers["x-request-id"] == expected


async def test_requests_of_one_name_are_two(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    """R104"""
    body = {"prompt": "hi", "request_id": "same", "max_tokens": 1}
    async with (
        background(client.post("/v1/completions", json={**body, "seed": 1})) as one,
        background(client.post("/v1/completions", json={**body, "seed": 2})) as other,
    ):
        requests = [await mesh.tokenizer.hear(Generate) for _ in range(2)]
        assert requests[0].request_id != requests[1].request_id
        for request in requests:
            mesh.answer(request)
        texts = [(await task).json()["choices"][0]["text"] for task in (one, other)]
    assert texts == ["seed1", "seed2"]

"""Whole answers over a scripted mesh: shapes, indices, usage, routes, refusals."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway import admission
from services.gateway.tenants import tenant_of
from shared.messages import Abort, Admitted, Failure, Generate, Refused
from shared.types import FinishReason, ServiceName
from tests.services.gateway.scripted_mesh import CREDIT, MODEL, ScriptedMesh, background, until

CHAT = [{"role": "user", "content": "hi"}]
CAPACITY = CREDIT.max_num_seqs + CREDIT.max_queue


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", **body})


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def test_completion(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    mesh.autopilot = True
    response = await complete(client, seed=7, max_tokens=3)
    body = response.json()
    assert response.status_code == 200, body
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "text": "seed7 word2 word3",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_chat(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    mesh.autopilot = True
    response = await client.post(
        "/v1/chat/completions", json={"messages": CHAT, "seed": 7, "max_tokens": 2}
    )
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "seed7 word2", "refusal": None}
    assert choice["finish_reason"] == "length"


async def test_prompts_and_samples_keep_their_places(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    mesh.autopilot = True
    body = (await complete(client, prompt=["a", "b"], n=3, seed=5, max_tokens=1)).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == ["seed5", "seed6", "seed7"] * 2
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    # Each prompt counts once, whatever the number of its samples.
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 6, 12)


@pytest.mark.parametrize("admitted_first", [False, True])
async def test_usage_tells_what_was_cached(
    mesh: ScriptedMesh, client: httpx.AsyncClient, admitted_first: bool
) -> None:
    async with background(complete(client, n=2)) as answering:
        first = await mesh.tokenizer.hear(Generate)
        if admitted_first:  # the scheduler's word can come before the detokenizer's
            mesh.scheduler.tell(Admitted(first.request_id, 2))
            await until(lambda: mesh.choices()[0].cached_tokens == 2)
        mesh.accept(first)
        second = await mesh.tokenizer.hear(Generate)
        mesh.accept(second)
        if not admitted_first:
            mesh.scheduler.tell(Admitted(first.request_id, 2))
        mesh.scheduler.tell(Admitted(second.request_id, 1))
        await until(lambda: [one.cached_tokens for one in mesh.choices()] == [2, 1])
        for request in (first, second):
            mesh.delta(request, "a", FinishReason.STOP)
        usage = (await answering).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}  # a prompt counts once


async def test_the_mesh_hears_for_whom_and_how_urgently(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    options = {"user": "me", "priority": -3, "cache_salt": "s"}
    async with background(complete(client, **options)):
        urgent = await mesh.tokenizer.hear(Generate)
    async with background(complete(client)):
        plain = await mesh.tokenizer.hear(Generate)
    assert (urgent.tenant, urgent.priority, urgent.cache_salt) == (tenant_of(None, "me"), -3, "s")
    assert (plain.tenant, plain.priority, plain.cache_salt) == ("", 0, "")


async def test_further_samples_go_when_the_first_is_taken(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    """So a prompt that is refused is tokenized once, not n times."""
    async with background(complete(client, n=3, max_tokens=1)) as answering:
        first = await mesh.tokenizer.hear(Generate)
        assert mesh.tokenizer.heard[Generate].empty()
        mesh.answer(first)
        mesh.answer(await mesh.tokenizer.hear(Generate))
        mesh.answer(await mesh.tokenizer.hear(Generate))
        assert (await answering).status_code == 200


async def test_what_the_mesh_is_told(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    async with background(complete(client, prompt=[5, 6], stop=["x"], max_tokens=1)) as answering:
        request = await mesh.tokenizer.hear(Generate)
        assert request.prompt.token_ids is not None
        assert request.prompt.token_ids.tolist() == [5, 6]
        assert request.params.stop == ["x"]
        assert (request.route.gateway, request.route.detokenizer) == ("gateway.0", "detokenizer.0")
        mesh.accept(request)
        mesh.delta(request, "abc", FinishReason.STOP, stop_reason="x")
        choice = (await answering).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            "abc",
            "stop",
            "x",
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_comes_as_json(
    mesh: ScriptedMesh, client: httpx.AsyncClient, stream: bool
) -> None:
    async with background(complete(client, n=2, stream=stream)) as answering:
        request = await mesh.tokenizer.hear(Generate)
        failure = Failure(400, "too long", "prompt", "context_length_exceeded")
        mesh.tokenizer.tell(Refused(request.request_id, failure))
        response = await answering
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert error_of(response) == {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    assert not mesh.gateways[0].busy


async def test_one_refused_prompt_ends_the_others(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(complete(client, prompt=["a", "b"])) as answering:
        first, second = [await mesh.tokenizer.hear(Generate) for _ in range(2)]
        mesh.accept(first)
        mesh.scheduler.tell(Refused(second.request_id, Failure(429, "full")))
        response = await answering
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        for peer in (mesh.scheduler, mesh.detokenizer):
            assert (await peer.hear(Abort)).request_id == first.request_id


async def test_a_seed_is_drawn_for_each_request(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    mesh.autopilot = True
    texts = {(await complete(client, max_tokens=1)).json()["choices"][0]["text"] for _ in range(8)}
    assert len(texts) == 8


async def test_models(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert (await client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    assert error_of(await client.get("/v1/models/a/b"))["code"] == "model_not_found"


async def test_names_of_the_model(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    mesh.autopilot = True
    for model in (MODEL, None):
        assert (await complete(client, model=model)).json()["model"] == MODEL
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        for name in ("wrong", "", "x" * 100_000):
            response = await client.post(path, json={**body, "model": name})
            assert response.status_code == 404
            error = error_of(response)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert MODEL in error["message"]
            assert len(response.content) < 1000


async def test_a_full_server_refuses(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    async with background(complete(client, prompt=["x"] * CAPACITY, max_tokens=1)) as answering:
        requests = [await mesh.tokenizer.hear(Generate) for _ in range(CAPACITY)]
        for stream in (False, True):
            response = await complete(client, stream=stream)
            assert response.status_code == 429
            assert response.headers["retry-after"]
            assert error_of(response)["code"] == "rate_limit_exceeded"
        mesh.answer(requests[0])
        for request in requests[1:]:
            mesh.answer(request)
        assert (await answering).status_code == 200
    assert (await complete(client, prompt=["x"] * (CAPACITY + 1))).status_code == 400
    mesh.autopilot = True
    assert (await complete(client)).status_code == 200


async def test_not_ready_when_an_outage_lasts(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "OUTAGE_SECONDS", 0.0)
    await mesh.kill(mesh.scheduler)
    response = await until_status(client, 503)
    assert response.headers["retry-after"]
    assert ServiceName.SCHEDULER in error_of(response)["message"]


async def until_status(client: httpx.AsyncClient, status: int) -> httpx.Response:
    while (response := await complete(client)).status_code != status:
        pass
    return response

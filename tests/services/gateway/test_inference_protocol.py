"""The Open Inference Protocol: what KServe and clients of Triton ask for."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shared.messages import Generate
from shared.types import FinishReason
from tests.services.gateway.scripted_mesh import MODEL, ScriptedMesh, background

PATHS = [f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/versions/1"]


async def get(client: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_health_and_metadata(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    assert (await get(client, "/v2"))["name"] == "headrace"
    assert await get(client, "/v2/health/live") == {"live": True}
    assert await get(client, "/v2/health/ready") == {"ready": True}
    for path in PATHS:
        model = await get(client, path)
        assert (model["name"], model["versions"]) == (MODEL, ["1"])
        assert [one["name"] for one in model["inputs"]] == ["text_input"]
        assert await get(client, f"{path}/ready") == {"name": MODEL, "ready": True}
    await mesh.kill(mesh.executor)
    assert await get(client, "/v2/health/ready", 503) == {"ready": False}
    assert await get(client, f"{PATHS[0]}/ready", 503) == {"name": MODEL, "ready": False}
    assert await get(client, "/v2/health/live") == {"live": True}


@pytest.mark.parametrize("path", PATHS)
async def test_generate(mesh: ScriptedMesh, client: httpx.AsyncClient, path: str) -> None:
    parameters = {"temperature": 0, "max_new_tokens": 2, "stop": ["x"], "details": True}
    body = {"id": "mine", "text_input": "hi", "parameters": parameters}
    async with background(client.post(f"{path}/generate", json=body)) as asking:
        request = await mesh.tokenizer.hear(Generate)
        params = request.params
        assert (params.temperature, params.max_tokens, params.stop) == (0, 2, ["x"])
        assert request.prompt.text == "hi"
        mesh.accept(request)
        mesh.delta(request, "one")
        mesh.delta(request, " two", FinishReason.LENGTH)
        answer = (await asking).json()
    assert answer == {
        "id": "mine",
        "model_name": MODEL,
        "model_version": "1",
        "text_output": "one two",
        "details": {"finish_reason": "length", "prompt_tokens": 3, "completion_tokens": 2},
    }


async def test_generate_stream(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    mesh.autopilot = True
    body = {"text_input": "hi", "parameters": {"max_tokens": 3, "seed": 5}}
    answer = await client.post(f"{PATHS[0]}/generate_stream", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == "seed5 word2 word3"
    assert {event["model_name"] for event in events} == {MODEL}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (f"{PATHS[0]}/generate", {}, 400),
        (f"{PATHS[0]}/generate", {"text_input": "a", "parameters": {"top_p": 7}}, 400),
        (f"{PATHS[0]}/generate_stream", {"text_input": 5}, 400),
        ("/v2/models/other/generate", {"text_input": "a"}, 404),
        (f"/v2/models/{MODEL}/versions/2/generate", {"text_input": "a"}, 404),
        ("/v2/nothing", {}, 404),
    ],
)
async def test_refusals_have_the_protocols_form(
    client: httpx.AsyncClient, path: str, body: Any, status: int
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert isinstance(answer.json()["error"], str)

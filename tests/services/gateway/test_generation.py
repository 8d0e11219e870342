"""Completions and chats over a scripted mesh: shapes of answers, indices, usage, errors."""

from __future__ import annotations

from typing import Any

import httpx

from tests.services.gateway.scripted_mesh import MODEL, ScriptedMesh

CHAT = [{"role": "user", "content": "hi"}]


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", **body})


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
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}

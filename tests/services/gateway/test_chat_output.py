"""Reasoning and calls over HTTP, with the mesh's words in the test's hands."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.messages import Generate
from shared.types import FinishReason
from tests.services.gateway.scripted_mesh import (
    ScriptedMesh,
    background,
    events_of,
    scripted_mesh,
    wait_ready,
)
from tests.services.gateway.test_tools import OTHER, TOOL

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
PIECES = ["<thi", "nk>which", " city?</think>", "\n", "Wait. <tool", CALL[5:30], CALL[30:], "\n"]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL, OTHER]}
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Rome"}'}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", [False, True])
async def test_an_answer_with_everything(tiny_model: Any, stream: bool, shown: bool) -> None:
    async with scripted_mesh() as mesh:
        url = await mesh.start_gateway(tiny_model, reasoning_parser="qwen3")
        await mesh.start_all()
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            await wait_ready(client)
            response = await ask(mesh, client, stream=stream, include_reasoning=shown)
    reasoning = {"reasoning_content": "which city?"} if shown else {}
    if not stream:
        (choice,) = response.json()["choices"]
        (call,) = choice["message"].pop("tool_calls")
        assert (call["type"], call["function"]) == ("function", FUNCTION)
        assert choice["message"] == {
            "role": "assistant",
            "content": "Wait.",
            "refusal": None,
            **reasoning,
        }
    else:
        *events, done = events_of(response.text)
        assert done == "[DONE]"
        (choice,) = events[-1]["choices"]
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert thoughts == reasoning.get("reasoning_content", "")
        assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
        arguments = "".join(call["function"]["arguments"] for call in calls)
        assert arguments == FUNCTION["arguments"]
    assert choice["finish_reason"] == "tool_calls"


async def ask(mesh: ScriptedMesh, client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    async with background(client.post("/v1/chat/completions", json=BODY | fields)) as asking:
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request)
        for piece in PIECES:
            mesh.delta(request, piece)
        mesh.delta(request, "", FinishReason.STOP)
        return await asking

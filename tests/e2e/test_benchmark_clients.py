"""The requests of `vllm bench serve`, with its flags, as that program writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.harness import MODEL, RunningMesh

TOKENS = 24
COMMON: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "logprobs": None,
}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "One two three", "max_tokens": TOKENS}),
    ("/v1/completions", {"prompt": [5, 6, 7, 8], "max_tokens": TOKENS}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "One two"}]}],
            "max_completion_tokens": TOKENS,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_streams_of_fixed_length(mesh: RunningMesh, path: str, body: dict[str, Any]) -> None:
    answer = mesh.client.post(path, json=COMMON | body)
    assert answer.status_code == 200, answer.text
    *events, done = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "length"

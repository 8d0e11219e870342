"""Streamed text joined equals the text without streaming."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.harness import RunningMesh
from tests.e2e.reference import Reference
from tests.e2e.sse import stream

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hi."}], "temperature": 0}


def test_200_wild_seeds(mesh: RunningMesh, reference: Reference) -> None:
    """R007: at temperature 2 a small model emits lone bytes of characters.

    All streams are what their ids are at once; every fifth is also asked for without streaming.
    """

    def check(seed: int) -> bool:
        body: dict[str, Any] = {"prompt": "Once", "temperature": 2, "seed": seed, "max_tokens": 20}
        streamed = stream(mesh, **body, return_token_ids=True)
        ids = [one for e in streamed.events for one in e["choices"][0].get("token_ids", [])]
        assert streamed.text == reference.tokenizer.decode(ids), seed
        if seed % 5 == 0:
            whole = mesh.post("/v1/completions", **body).json()["choices"][0]
            assert streamed.text == whole["text"], seed
            assert streamed.finish_reason == whole["finish_reason"], seed
        return "\ufffd" in streamed.text

    with ThreadPoolExecutor(50) as pool:
        broken = sum(pool.map(check, range(200)))
    assert broken  # else this test did not see what it is for


def test_usage_counts_tokens_not_chunks(mesh: RunningMesh) -> None:
    """R022: counts, finish reason and object, streaming and not."""
    options = {"max_tokens": 7, "ignore_eos": True}
    whole = mesh.post("/v1/chat/completions", **CHAT, **options).json()
    streamed = stream(
        mesh, "/v1/chat/completions", **CHAT, **options, stream_options={"include_usage": True}
    )
    usage = streamed.events[-1]["usage"]
    assert streamed.events[-1]["choices"] == []
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[count] == whole["usage"][count]
    assert usage["completion_tokens"] == 7
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7
    chat = {"messages": CHAT["messages"], "add_generation_prompt": True}
    assert mesh.post("/tokenize", **chat).json()["count"] == usage["prompt_tokens"]
    assert {event["object"] for event in streamed.events} == {"chat.completion.chunk"}
    assert whole["object"] == "chat.completion"
    assert streamed.finish_reason == "length"
    assert whole["choices"][0]["finish_reason"] == "length"


def test_chunks_have_the_form_of_openai(mesh: RunningMesh) -> None:
    """R023: finish_reason is null until the last chunk; the role comes first."""
    streamed = stream(mesh, "/v1/chat/completions", **CHAT, max_tokens=3)
    first, *rest = streamed.events
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert len({event["id"] for event in streamed.events}) == 1
    assert all("role" not in event["choices"][0]["delta"] for event in rest)
    assert streamed.finish_reason == "length"
    whole = mesh.post("/v1/chat/completions", **CHAT, max_tokens=3).json()
    assert whole["choices"][0]["message"]["content"] == streamed.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_n_choices(mesh: RunningMesh, path: str) -> None:
    body: dict[str, Any] = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 12}
    body |= {"prompt": "Once"} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    choices = mesh.post(path, **body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in choices]
    assert len(set(texts)) == 3
    streamed: dict[int, str] = {0: "", 1: "", 2: ""}
    for event in stream_events(mesh, path, body):
        for choice in event["choices"]:
            delta = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            streamed[choice["index"]] += delta
    assert list(streamed.values()) == texts


def stream_events(mesh: RunningMesh, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return stream(mesh, path, **body).events


def test_many_prompts(mesh: RunningMesh) -> None:
    prompts = ["One, two,", "The sea is", "def main"]
    choices = mesh.complete(prompts, max_tokens=5)["choices"]
    assert [choice["text"] for choice in choices] == [mesh.text(p, max_tokens=5) for p in prompts]
    ids = [mesh.post("/tokenize", prompt=prompt).json()["tokens"] for prompt in prompts]
    assert mesh.complete(ids, max_tokens=5)["choices"] == choices

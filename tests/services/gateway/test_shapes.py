"""Events are valid JSON on one line, whatever the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.collector import Change, Choice
from services.gateway.dialects.chat_shape import ChatShape
from services.gateway.dialects.completion import CompletionShape
from services.gateway.logprobs import as_key, completion_logprobs
from services.gateway.request import GenerationRequest
from services.gateway.shape import StreamShape, quote, usage_of
from shared.messages import Failure, Finished, Prompt
from shared.sampling import SamplingParams
from shared.types import FinishReason, RequestId

SHAPES: list[Callable[[GenerationRequest], StreamShape]] = [
    lambda request: CompletionShape(request, completion_logprobs, as_key),
    ChatShape,
]
CHARACTERS = st.characters(codec="utf-8")
TEXT = st.text(CHARACTERS)
LINE_ENDS = st.sampled_from(["\r", "\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])


def request(n: int = 1, prompts: int = 1, usage: bool = False) -> GenerationRequest:
    params = SamplingParams(seed=1)
    return GenerationRequest("m/\u2028", [Prompt(text="x")] * prompts, n, params, True, usage)


def payload(event: bytes) -> Any:
    text = event.decode()
    assert text.endswith("\n\n")
    assert len(text.splitlines()) == 2  # of whatever kind the line ends are
    return json.loads(text.removeprefix("data: "))


@given(st.text(CHARACTERS | LINE_ENDS))
def test_quoted_text_is_json_on_one_line(text: str) -> None:
    quoted = quote(text)
    assert json.loads(quoted) == text
    assert len(quoted.splitlines()) == 1


@pytest.mark.parametrize("shape", SHAPES)
@given(st.integers(0, 200), TEXT, st.none() | st.integers() | TEXT, st.booleans())
def test_events(
    shape: Callable[[GenerationRequest], StreamShape],
    index: int,
    text: str,
    stop_reason: str | int | None,
    usage: bool,
) -> None:
    writer = shape(request(usage=usage))
    choices = [Choice()]
    finished = Finished(RequestId("x"), FinishReason.STOP, 3, stop_reason)
    events = [
        payload(event)
        for event in (
            writer.opening(choices)[: 0 if index else None],
            writer.event(Change(index, text, None), choices),
            writer.event(Change(index, text, finished), choices),
        )
        if event
    ]
    for event in events:
        assert event["choices"][0]["index"] == index
        assert event["choices"][0]["logprobs"] is None
        assert ("usage" in event) == usage
        assert (event["id"], event["model"]) == (writer.id, "m/\u2028")
    *_, middle, last = (event["choices"][0] for event in events)
    assert (middle["finish_reason"], middle["stop_reason"]) == (None, None)
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop_reason)
    for choice in (middle, last):
        assert choice.get("text", choice.get("delta", {}).get("content", "")) == text


@given(TEXT)
def test_error_events(message: str) -> None:
    event = payload(ChatShape(request()).failed(Failure(503, message, "a", "b")))
    assert event["error"] == {
        "message": message[:2000],
        "type": "server_error",
        "param": "a",
        "code": "b",
    }


def test_usage_counts_each_prompt_once() -> None:
    choices = [
        Choice(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=tokens)
        for prompt, cached, tokens in ((5, 0, 1), (5, 4, 2), (7, 4, 3), (7, 4, 4))
    ]
    usage = usage_of(request(n=2, prompts=2), choices)
    assert usage == {
        "prompt_tokens": 12,
        "completion_tokens": 10,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 4},
    }

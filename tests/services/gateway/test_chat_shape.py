"""Answers with reasoning and calls: a stream adds up to the whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.collector import Change, Choice
from services.gateway.dialects.chat_shape import ChatShape
from services.gateway.output import OutputParser
from services.gateway.parsing.hermes import HermesParser
from services.gateway.parsing.reasoning import Marks, ReasoningParser
from services.gateway.request import GenerationRequest
from services.gateway.shape import Answer
from shared.messages import Finished, Prompt
from shared.sampling import SamplingParams
from shared.types import FinishReason, RequestId
from tests.services.gateway.parsing.texts import TEXTS, cut
from tests.services.gateway.scripted_mesh import events_of

CALLS = '<think>hm</think>Well. <tool_call>{"name": "f", "arguments": {"a": "\u2028é"}}</tool_call>'


def new_parser() -> OutputParser:
    ids = itertools.count()
    answer = HermesParser(frozenset({"f"}), lambda: f"call_{next(ids)}")
    return ReasoningParser(Marks("<think>", "</think>"), answer, inside=False)


def shape(n: int = 1, **options: Any) -> ChatShape:
    params = SamplingParams(seed=1)
    request = GenerationRequest("m", [Prompt(text="x")], n, params, True, new_parser=new_parser)
    return ChatShape(request, **options)


def end(reason: FinishReason) -> Finished:
    return Finished(RequestId("x"), reason, 3)


def whole(text: str, reason: FinishReason = FinishReason.STOP, **options: Any) -> Any:
    answer = Answer(end(reason), 1, text)
    (choice,) = shape(**options).whole([answer], [Choice()])["choices"]
    return choice


def streamed(pieces: list[str], reason: FinishReason, **options: Any) -> tuple[Any, Any]:
    """The message that the deltas add up to, and the finish reason."""
    writer, choices = shape(**options), [Choice()]
    changes = [Change(0, piece, None) for piece in pieces] + [Change(0, "", end(reason))]
    raw = writer.opening(choices) + b"".join(writer.event(one, choices) for one in changes)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    *_, last = events = events_of(raw.decode())
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    for event in events:
        assert len(raw.decode().splitlines()) == 2 * len(events)  # of whatever kind they are
        add(message, event["choices"][0]["delta"])
    return message, last["choices"][0]["finish_reason"]


def add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        message[name] += delta.get(name) or ""
    for call in delta.get("tool_calls", []):
        if call["index"] == len(message["tool_calls"]):
            assert (call["type"], call["function"]["arguments"]) == ("function", "")
            function = {"name": call["function"]["name"], "arguments": ""}
            message["tool_calls"].append({"id": call["id"], "type": "function"})
            message["tool_calls"][-1]["function"] = function
        else:
            assert call.keys() == {"index", "function"}
            assert call["function"].keys() == {"arguments"}
        arguments = call["function"]["arguments"]
        message["tool_calls"][call["index"]]["function"]["arguments"] += arguments


@given(TEXTS | st.just(CALLS), st.lists(st.integers(0, 100)), st.sampled_from(list(FinishReason)))
def test_a_stream_adds_up_to_the_whole(text: str, places: list[int], reason: FinishReason) -> None:
    if reason not in (FinishReason.STOP, FinishReason.LENGTH):
        reason = FinishReason.STOP
    expected = whole(text, reason)
    message = {name: value for name, value in expected["message"].items() if value}
    added, finish = streamed(cut(text, places), reason)
    assert {name: value for name, value in added.items() if value} | {
        "role": "assistant"
    } == message
    assert finish == expected["finish_reason"]


def test_a_whole_answer() -> None:
    function = {"name": "f", "arguments": json.dumps({"a": "\u2028é"}, ensure_ascii=False)}
    assert whole(CALLS) == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Well.",
            "refusal": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "stop_reason": None,
    }


@pytest.mark.parametrize(
    ("text", "content"),
    [("", ""), ("hi", "hi"), ("<think>hm", None), (CALLS.replace("Well.", ""), None)],
)
def test_content_is_null_only_beside_something_else(text: str, content: str | None) -> None:
    assert whole(text)["message"]["content"] == content


def test_finish_reasons() -> None:
    assert whole(CALLS, FinishReason.LENGTH)["finish_reason"] == "length"
    assert whole(CALLS, called="stop")["finish_reason"] == "stop"
    assert whole("hi")["finish_reason"] == "stop"
    assert streamed([CALLS], FinishReason.LENGTH)[1] == "length"
    assert streamed([CALLS], FinishReason.STOP, called="stop")[1] == "stop"


def test_reasoning_can_be_left_out() -> None:
    assert "reasoning_content" not in whole(CALLS, show_reasoning=False)["message"]
    message, _ = streamed(list(CALLS), FinishReason.STOP, show_reasoning=False)
    assert (message["reasoning_content"], message["content"]) == ("", "Well.")


def test_each_choice_is_read_alone() -> None:
    writer, choices = shape(n=2), [Choice(), Choice()]
    for piece in CALLS:
        writer.event(Change(0, piece, None), choices)
    (event,) = events_of(writer.event(Change(1, "hi", end(FinishReason.STOP)), choices).decode())
    assert event["choices"][0]["delta"] == {"content": "hi"}
    assert event["choices"][0]["finish_reason"] == "stop"
    (event,) = events_of(writer.event(Change(0, "", end(FinishReason.STOP)), choices).decode())
    assert event["choices"][0]["finish_reason"] == "tool_calls"

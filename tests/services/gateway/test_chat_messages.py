"""Messages of a chat: roles, parts, and the naming of what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.chat import read_messages
from services.gateway.errors import ApiError


def calling(arguments: Any = "{}", **others: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function, **others}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_calls_and_their_results() -> None:
    """R116: what clients send back of an answer with calls."""
    messages = [
        calling('{"city": "Paris"}') | {"refusal": None, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20 C"}]},
        calling("") | {"content": "So: ", "name": "bob"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "done"},
    ]
    function: dict[str, Any] = {"name": "f", "arguments": {"city": "Paris"}}
    empty = {"name": "f", "arguments": {}}
    call = {"id": "call_1", "type": "function", "function": function}
    legacy = {"id": "000000000", "type": "function", "function": empty}
    assert read_messages(messages) == [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "20 C"},
        {
            "role": "assistant",
            "content": "So: ",
            "name": "bob",
            "tool_calls": [{**call, "function": empty}],
        },
        {"role": "assistant", "content": None, "tool_calls": [legacy]},
        {"role": "tool", "tool_call_id": "000000000", "name": "f", "content": "done"},
    ]


def test_roles_and_texts() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "hello", "tool_calls": [], "refusal": None},
    ]
    assert read_messages(messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "hello"},
    ]


def test_text_parts_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "a\nb"}
    ]
    assert read_messages([{"role": "user", "content": []}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("message", "naming"),
    [
        (5, "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": "alien", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": 5}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "x", "name": 5}, "messages[1].name"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio'"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "audio"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[1].content"),
        ({"role": "function", "content": "x"}, "messages[1].name"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
        ({"role": "assistant", "reasoning_content": 5, "content": "x"}, ".reasoning_content"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0]"),
        (calling(id=None), "messages[1].tool_calls[0].id"),
        (calling(type="custom"), "messages[1].tool_calls[0].type"),
        (calling(function=None), "messages[1].tool_calls[0].function"),
        (calling(function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
        (calling(function={"name": "f"}), "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments={"a": 1}), "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments="{"), "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments="[1]"), "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments="[" * 100_000), "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call.arguments"),
    ],
)
def test_bad_messages_are_named(message: Any, naming: str) -> None:
    """R068: parts that are no text are refused by their type, and never left out."""
    with pytest.raises(ApiError) as caught:
        read_messages([{"role": "user", "content": "hi"}, message])
    failure = caught.value.failure
    assert (failure.status, failure.param) == (400, "messages")
    assert naming in failure.message


def test_no_messages() -> None:
    for messages in ([], [{"role": "user", "content": "x"}] * 10_001):
        with pytest.raises(ApiError):
            read_messages(messages)

"""Messages of a chat: roles, parts, and the naming of what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.chat import read_messages
from services.gateway.errors import ApiError


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
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "tool"),
        ({"role": "tool", "content": "x"}, "tool"),
        ({"role": "function", "content": "x", "name": "f"}, "tool"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "tool"),
    ],
)
def test_bad_messages_are_named(message: Any, naming: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages([{"role": "user", "content": "hi"}, message])
    failure = caught.value.failure
    assert (failure.status, failure.param) == (400, "messages")
    assert naming in failure.message


def test_no_messages() -> None:
    for messages in ([], [{"role": "user", "content": "x"}] * 10_001):
        with pytest.raises(ApiError):
            read_messages(messages)

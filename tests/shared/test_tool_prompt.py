"""Tools, calls and results as words, for templates that know none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.chat_template import ChatError, ChatTemplate

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '\n' }}{% endfor %}"
AWARE = "{{ tools }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
USER = {"role": "user", "content": "hi"}
CHAT: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "1", "content": "two"},
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "three"},
]


def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return ChatTemplate(source, {}).render(json.dumps({"messages": messages, **variables}))


def test_tools_are_told_in_the_system_message() -> None:
    alone = render(PLAIN, [USER], tools=TOOLS)
    assert alone.startswith("<system># Tools\n")
    assert f"<tools>\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n</tools>" in alone
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in alone
    assert alone.endswith("</tool_call>\n<user>hi\n")
    system = {"role": "system", "content": "Be brief."}
    beside = render(PLAIN, [system, USER], tools=TOOLS)
    assert beside == alone.replace("<system>", "<system>Be brief.\n\n")


def test_calls_and_results_become_texts() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
    assert render(PLAIN, CHAT) == (
        f"<user>hi\n<assistant>{call}{call}"
        "<user><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n"
        f"<assistant>Well.\n{call}<user><tool_response>\nthree\n</tool_response>\n"
    )


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    text = render(AWARE, CHAT, tools=TOOLS)
    assert text.startswith("[{'type': 'function'")
    assert text.count('"tool_calls"') == 2
    assert text.count('"role": "tool"') == 3
    assert '"content": null' in text


@pytest.mark.parametrize("call", [5, {}, {"function": {"name": "f"}}])
def test_what_is_no_call_is_a_refusal(call: Any) -> None:
    with pytest.raises(ChatError):
        render(PLAIN, [{"role": "assistant", "tool_calls": [call]}])

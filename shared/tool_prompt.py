"""Tools for chat templates that know none: told in words, as Hermes models have learnt them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

Message = dict[str, Any]

TELLING = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def in_words(messages: list[Message], tools: list[Any] | None) -> list[Message]:
    """The chat with its tools in the system message, and its calls and their results as texts."""
    told = [_told_calls(message) for message in messages]
    told = list(_told_results(told))
    if not tools:
        return told
    text = TELLING.format(tools="\n".join(_dump(tool) for tool in tools))
    if told and told[0].get("role") == "system":
        system = told.pop(0)
        text = f"{system.get('content') or ''}\n\n{text}".lstrip("\n")
    return [{"role": "system", "content": text}, *told]


def _told_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message.get("content") or "", *map(_told_call, calls)]
    content = "\n".join(text for text in texts if text)
    return {name: value for name, value in message.items() if name != "tool_calls"} | {
        "content": content
    }


def _told_call(call: Any) -> str:
    function = call["function"]
    content = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_dump(content)}\n</tool_call>"


def _told_results(messages: list[Message]) -> Iterator[Message]:
    """Results that follow one another are one message of the user's."""
    for is_result, group in groupby(messages, lambda message: message.get("role") == "tool"):
        if is_result:
            texts = [f"<tool_response>\n{one.get('content')}\n</tool_response>" for one in group]
            yield {"role": "user", "content": "\n".join(texts)}
        else:
            yield from group


def _dump(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False)

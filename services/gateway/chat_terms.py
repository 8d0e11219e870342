"""What other dialects have in common where they say what they want in terms of chats."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from services.gateway.request import Context, GenerationRequest

Message = dict[str, Any]


def turns(messages: Iterable[Message], roles: Collection[str]) -> Iterator[Message]:
    """Neighbours of one of these roles become one message."""
    for role, group in groupby(messages, lambda message: message["role"]):
        if role in roles:
            yield _joined(role, list(group))
        else:
            yield from group


def _joined(role: str, messages: list[Message]) -> Message:
    known: Message = {"role": role}
    for name in ("content", "reasoning_content"):
        texts = [text for message in messages if (text := message.get(name))]
        if texts:
            known[name] = "\n".join(texts)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if calls:
        known["tool_calls"] = calls
    return known if calls else {"content": ""} | known


def is_object(text: str) -> bool:
    """Whether it is the JSON text of an object, as the arguments of a call have to be."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def assistant_call(id: str, name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def with_thoughts_counted(request: GenerationRequest, context: Context) -> GenerationRequest:
    """See that tokens are told, if there may be thoughts: their ends say which tokens are those."""
    if request.new_parser is None or context.formats.thoughts is None:
        return request
    told = request.params.logprobs or 0
    return replace(request, params=replace(request.params, logprobs=told))


def thinking_variables(wanted: bool) -> dict[str, Any]:
    """For a chat template: whether the model is to think, under the names in use."""
    return {"enable_thinking": wanted, "thinking": wanted}

"""The messages of /v1/messages as those of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from services.gateway.chat import MAX_MESSAGES
from services.gateway.chat_terms import Message, assistant_call, turns
from services.gateway.places import read_content, read_object, read_text, unsupported, wrong

ROLES = ("user", "assistant", "system")
TEXT = {"text": "text"}


def read_messages(messages: list[Any], system: Any) -> list[Message]:
    """Raises ApiError naming the place.

    Neighbours of one role are one turn, as in Anthropic's API.
    """
    if not messages:
        raise wrong("messages", "at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise wrong("messages", f"more than {MAX_MESSAGES} messages")
    read = (
        one
        for place, message in enumerate(messages)
        for one in _read(f"messages[{place}]", message)
    )
    told = []
    if system is not None:
        told = [{"role": "system", "content": read_content("system", system, TEXT)}]
    return [*told, *turns(read, {"user", "assistant"})]


def _read(at: str, message: Any) -> Iterator[Message]:
    message = read_object(at, message)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise wrong(f"{at}.role", f"must be one of {', '.join(ROLES)}")
    if role == "system" or not isinstance(content, list) or not content:
        yield {"role": role, "content": read_content(f"{at}.content", content, TEXT)}
        return
    for place, block in enumerate(content):
        where = f"{at}.content[{place}]"
        yield from _block(where, role, read_object(where, block))


def _block(at: str, role: str, block: dict[str, Any]) -> Iterator[Message]:
    match role, read_text(at, block, "type"):
        case _, "text":
            yield {"role": role, "content": read_text(at, block, "text")}
        case "user", "tool_result":
            content = read_content(f"{at}.content", block.get("content") or "", TEXT)
            id = read_text(at, block, "tool_use_id")
            yield {"role": "tool", "tool_call_id": id, "content": content}
        case "assistant", "tool_use":
            input = read_object(f"{at}.input", block.get("input"))
            id, name = read_text(at, block, "id"), read_text(at, block, "name")
            yield assistant_call(id, name, json.dumps(input, ensure_ascii=False))
        case "assistant", "thinking":
            yield {"role": role, "reasoning_content": read_text(at, block, "thinking")}
        case "assistant", "redacted_thinking":
            yield {"role": role}  # only the server that wrote it can read it
        case _, kind:
            raise unsupported(at, f"blocks of type {kind[:40]!r} are not supported in {role} turns")

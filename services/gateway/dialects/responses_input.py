"""The input of /v1/responses as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.gateway.chat import MAX_MESSAGES
from services.gateway.chat_terms import Message, assistant_call, is_object, turns
from services.gateway.places import read_content, read_object, read_text, unsupported, wrong

ROLES = ("user", "assistant", "system", "developer")
# Type of a part -> the key that holds its text
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
THOUGHTS = {"reasoning_text": "text", "text": "text"}


def read_input(input: Any, instructions: str | None) -> list[Message]:
    """Raises ApiError naming the place.

    What a model has answered (reasoning, text, calls) are items of their own in the input, and one
    message of the chat.
    """
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(input, str):
        return [*messages, {"role": "user", "content": input}]
    if not isinstance(input, list):
        raise wrong("input", "must be a text or a list of items")
    if not input:
        raise wrong("input", "at least one item is needed")
    if len(input) > MAX_MESSAGES:
        raise wrong("input", f"more than {MAX_MESSAGES} items")
    read = (message for place, item in enumerate(input) for message in _read(place, item))
    return [*messages, *turns(read, {"assistant"})]


def _read(place: int, item: Any) -> Iterator[Message]:
    at = f"input[{place}]"
    item = read_object(at, item)
    kind = item.get("type")
    match "message" if kind is None else kind:
        case "message":
            role = item.get("role")
            if role not in ROLES:
                raise wrong(f"{at}.role", f"must be one of {', '.join(ROLES)}")
            yield {
                "role": role,
                "content": read_content(f"{at}.content", item.get("content"), TEXTS),
            }
        case "function_call":
            id, name, arguments = (
                read_text(at, item, key) for key in ("call_id", "name", "arguments")
            )
            if not is_object(arguments):
                raise wrong(f"{at}.arguments", "must be the JSON text of an object")
            yield assistant_call(id, name, arguments)
        case "function_call_output":
            content = read_content(f"{at}.output", item.get("output"), TEXTS)
            yield {
                "role": "tool",
                "tool_call_id": read_text(at, item, "call_id"),
                "content": content,
            }
        case "reasoning":
            content = read_content(f"{at}.content", item.get("content") or [], THOUGHTS)
            if content:  # else only the server that wrote it can read it
                yield {"role": "assistant", "reasoning_content": content}
        case _:
            raise unsupported(at, f"items of type {str(kind)[:40]!r} are not supported")

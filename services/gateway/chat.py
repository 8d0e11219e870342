"""The messages of a chat, checked and reduced to what a template takes."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.errors import ApiError, invalid

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # part type -> the key that holds its text
REASONING = ("reasoning_content", "reasoning")
MAX_MESSAGES = 10_000
LEGACY_ID = "000000000"  # of a function_call, which has none; some templates want nine characters

Message = dict[str, Any]


def read_messages(messages: list[Any]) -> list[Message]:
    """Messages of OpenAI's shape for a template; raises ApiError naming the place.

    Each has role and content, and what it has of name, reasoning_content, tool_call_id and
    tool_calls, whose arguments are objects. The content of an assistant that calls may be None.
    """
    if not messages:
        raise _invalid("", "at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise _invalid("", f"more than {MAX_MESSAGES} messages")
    return [_message(f"[{index}]", message) for index, message in enumerate(messages)]


def _message(at: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise _invalid(at, "must be an object")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"{at}.role", f"must be one of {', '.join(ROLES)}")
    if "audio" in given:
        raise _unsupported(f"{at}.audio", "audio is not supported: this server takes text only")
    known: Message = {"role": ROLES[role]}
    if role == "assistant":
        known |= _assistant(at, given)
    elif role == "tool":
        known["tool_call_id"] = _text(at, given, "tool_call_id")
    elif role == "function":
        known |= {"tool_call_id": LEGACY_ID, "name": _text(at, given, "name")}
    if not (known.get("tool_calls") and "content" not in given):
        known["content"] = _content(f"{at}.content", given.get("content"))
    else:
        known["content"] = None
    return known | ({"name": _text(at, given, "name")} if "name" in given else {})


def _assistant(at: str, message: Message) -> Message:
    known: Message = {}
    for name in REASONING:
        if name in message:
            known["reasoning_content"] = _text(at, message, name)
            break
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise _invalid(f"{at}.tool_calls", "must be a list")
    read = [_tool_call(f"{at}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    if "function_call" in message:
        function = _function(f"{at}.function_call", message["function_call"])
        read.append({"id": LEGACY_ID, "type": "function", "function": function})
    return known | ({"tool_calls": read} if read else {})


def _tool_call(at: str, call: Any) -> Message:
    if not isinstance(call, dict):
        raise _invalid(at, "must be an object")
    if call.get("type", "function") != "function":
        raise _unsupported(f"{at}.type", "calls are of type function only")
    function = _function(f"{at}.function", call.get("function"))
    return {"id": _text(at, call, "id"), "type": "function", "function": function}


def _function(at: str, function: Any) -> Message:
    if not isinstance(function, dict):
        raise _invalid(at, "must be an object")
    arguments = _arguments(f"{at}.arguments", function.get("arguments"))
    return {"name": _text(at, function, "name"), "arguments": arguments}


def _arguments(at: str, text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        raise _invalid(at, "must be a JSON text")
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _invalid(at, "must be the JSON text of an object")
    return arguments


def _content(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(at, "must be a text or a list of text parts")
    return "\n".join(_part(f"{at}[{index}]", part) for index, part in enumerate(content))


def _part(at: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise _invalid(at, "must be an object with a type")
    kind = _text(at, part, "type")
    if kind not in TEXT_PARTS:
        raise _unsupported(at, f"parts of type {kind[:40]!r} are not supported: text only")
    return _text(at, part, TEXT_PARTS[kind])


def _text(at: str, holder: Message, name: str) -> str:
    text = holder.get(name)
    if not isinstance(text, str):
        raise _invalid(f"{at}.{name}", "must be a text")
    return text


def _invalid(at: str, what: str) -> ApiError:
    return invalid(f"messages{at}: {what}.", "messages")


def _unsupported(at: str, what: str) -> ApiError:
    return invalid(f"messages{at}: {what}.", "messages", "unsupported_value")

"""The messages of a chat, checked and reduced to what a text template takes: role and text."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import ApiError, invalid

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TOOL_ROLES = frozenset({"tool", "function"})
KNOWN_ROLES = TOOL_ROLES | ROLES.keys()
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # part type -> the key that holds its text
MAX_MESSAGES = 10_000


def read_messages(messages: list[Any]) -> list[dict[str, str]]:
    """Messages of OpenAI's shape as {role, content[, name]}; raises ApiError naming the place."""
    if not messages:
        raise _invalid("", "at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise _invalid("", f"more than {MAX_MESSAGES} messages")
    return [_message(f"[{index}]", message) for index, message in enumerate(messages)]


def _message(at: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _invalid(at, "must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in KNOWN_ROLES:
        raise _invalid(f"{at}.role", f"must be one of {', '.join(ROLES)}")
    if role in TOOL_ROLES or message.get("tool_calls") or message.get("function_call"):
        raise _unsupported(at, "tool messages and tool calls are not supported yet")
    if message.get("audio") is not None:
        raise _unsupported(f"{at}.audio", "audio is not supported: this server takes text only")
    known = {"role": ROLES[role], "content": _content(f"{at}.content", message.get("content"))}
    name = message.get("name")
    if name is None:
        return known
    if not isinstance(name, str):
        raise _invalid(f"{at}.name", "must be a text")
    return known | {"name": name}


def _content(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(at, "must be a text or a list of text parts")
    return "\n".join(_part(f"{at}[{index}]", part) for index, part in enumerate(content))


def _part(at: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise _invalid(at, "must be an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise _invalid(f"{at}.type", "must be a text")
    if kind not in TEXT_PARTS:
        raise _unsupported(at, f"parts of type {kind[:40]!r} are not supported: text only")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _invalid(f"{at}.{TEXT_PARTS[kind]}", "must be a text")
    return text


def _invalid(at: str, what: str) -> ApiError:
    return invalid(f"messages{at}: {what}.", "messages")


def _unsupported(at: str, what: str) -> ApiError:
    return invalid(f"messages{at}: {what}.", "messages", "unsupported_value")

"""Reading a client's JSON: whatever is wrong is told with its place, such as input[2].content."""

from __future__ import annotations

import re
from typing import Any

from services.gateway.errors import ApiError, invalid

MAX_KIND_CHARS = 40  # of a type in a message


def read_object(at: str, value: Any) -> dict[str, Any]:
    """Raises ApiError, as do the others."""
    if not isinstance(value, dict):
        raise wrong(at, "must be an object")
    return value


def read_text(at: str, holder: dict[str, Any], name: str) -> str:
    text = holder.get(name)
    if not isinstance(text, str):
        raise wrong(f"{at}.{name}", "must be a text")
    return text


def read_content(at: str, content: Any, kinds: dict[str, str]) -> str:
    """A text, or a list of parts, whose texts become lines.

    `kinds`: type of a part -> the key that holds its text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(at, "must be a text or a list of text parts")
    return "\n".join(
        _read_part(f"{at}[{place}]", part, kinds) for place, part in enumerate(content)
    )


def _read_part(at: str, part: Any, kinds: dict[str, str]) -> str:
    kind = read_text(at, read_object(at, part), "type")
    if kind not in kinds:
        what = f"parts of type {kind[:MAX_KIND_CHARS]!r} are not supported: text only"
        raise unsupported(at, what)
    return read_text(at, part, kinds[kind])


def wrong(at: str, what: str) -> ApiError:
    """The field at fault is the first name of the place."""
    return invalid(f"{at}: {what}.", _field(at))


def unsupported(at: str, what: str) -> ApiError:
    return invalid(f"{at}: {what}.", _field(at), "unsupported_value")


def _field(at: str) -> str:
    return re.split(r"[.\[]", at, maxsplit=1)[0]

"""A call as one JSON object: {"name": "f", "arguments": {...}}."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.parsing.json_value import JsonValue
from services.gateway.parsing.reader import Reading
from services.gateway.parsing.tool_parser import ToolParser

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
OTHERS = ("id", "type")  # that models write, too


class CallObject:
    """Reads one call. Its arguments are given as they come, if the name has come before."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._reader = parser.reader
        self._name: str | None = None
        self._arguments: str | None = None  # as far as they are not given
        self._begun = False

    def read(self) -> Reading[bool]:
        """False as soon as it is none, or none of a known function."""
        reader = self._reader
        if not (yield from reader.literal("{")):
            return False
        while True:
            yield from reader.space()
            if not (yield from self._member()):
                return False
            yield from reader.space()
            if not (yield from reader.literal(",")):
                break
        return (yield from reader.literal("}")) and self._end()

    def _end(self) -> bool:
        if self._name is None:
            return False
        if not self._begun:
            self._parser.begin(self._name)
            self._parser.argue(self._arguments or "{}")
        self._reader.settle()
        return True

    def _member(self) -> Reading[bool]:
        reader = self._reader
        key = yield from self._value()
        yield from reader.space()
        if not isinstance(key, str) or not (yield from reader.literal(":")):
            return False
        yield from reader.space()
        if key == NAME and self._name is None:
            self._name = yield from self._value()
            return isinstance(self._name, str) and self._name in self._parser.names
        if key in ARGUMENTS and not self._begun and self._arguments is None:
            return (yield from self._argument_object())
        return key in OTHERS and (yield from self._text()) is not None

    def _argument_object(self) -> Reading[bool]:
        if not (yield from self._reader.some()):
            return False
        if self._name is not None and self._reader.peek == "{":
            self._begun = True
            self._parser.begin(self._name)
            return (yield from self._parser.arguments())
        text = yield from self._text()
        self._arguments = None if text is None else _object_text(text)
        return self._arguments is not None

    def _value(self) -> Reading[Any]:
        """A value that is needed as a whole; None if it is none."""
        text = yield from self._text()
        return None if text is None else json.loads(text)

    def _text(self) -> Reading[str | None]:
        value, tokens = JsonValue(), []
        while not value.done:
            token = yield from value.token(self._reader)
            if token is None:
                return None
            tokens.append(token)
        return "".join(tokens)


def _object_text(text: str) -> str | None:
    """The object that a value is, or holds as a text; null is an empty one; None: neither."""
    value = json.loads(text)
    if value is None:
        return "{}"
    if isinstance(value, dict):
        return text
    return value if isinstance(value, str) and _holds_object(value) else None


def _holds_object(text: str) -> bool:
    try:
        text.encode()  # no half characters
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")

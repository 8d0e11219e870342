"""JSON that comes in pieces: each token is given out as soon as it is sure to be right."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from services.gateway.parsing.reader import Reader, Reading

MAX_DEPTH = 100
MAX_SCALAR = 400  # characters of a number

_SPACE = re.compile(r"[ \t\r\n]+")
_CHARACTERS = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_CLOSING = {"{": "}", "[": "]"}


class _Next(Enum):
    """What may come, white space apart."""

    VALUE = auto()
    VALUE_OR_CLOSE = auto()
    KEY = auto()
    KEY_OR_CLOSE = auto()
    COLON = auto()
    COMMA_OR_CLOSE = auto()
    STRING = auto()  # the rest of one


class JsonValue:
    """One value. What is read of it is a valid beginning of one, always."""

    __slots__ = ("_next", "_open", "done")

    def __init__(self) -> None:
        self.done = False
        self._next = _Next.VALUE
        self._open: list[str] = []  # the objects and arrays around

    def token(self, reader: Reader) -> Reading[str | None]:
        """Read on; None if what is next does not belong to a value, or the text has ended.

        A control character in a string, which models write though JSON forbids it, is escaped.
        """
        if not (yield from reader.some()):
            return None
        if self._next is _Next.STRING:
            return (yield from self._in_string(reader))
        if space := reader.match(_SPACE):
            return reader.take(len(space[0]))
        return (yield from self._between(reader))

    def _in_string(self, reader: Reader) -> Reading[str | None]:
        if found := reader.match(_CHARACTERS):
            return reader.take(len(found[0]))
        if found := reader.match(_CONTROL):
            return json.dumps(reader.take(1))[1:-1]
        if reader.peek == '"':
            self._after_string()
            return reader.take(1)
        while not (found := reader.match(_ESCAPE)):
            if reader.ended or not reader.full_match(_BEGUN_ESCAPE):
                return None
            yield
        return reader.take(len(found[0]))

    def _between(self, reader: Reader) -> Reading[str | None]:
        match reader.peek, self._next:
            case '"', _Next.KEY | _Next.KEY_OR_CLOSE:
                self._open.append("key")
                self._next = _Next.STRING
            case '"', _Next.VALUE | _Next.VALUE_OR_CLOSE:
                self._next = _Next.STRING
            case ("{" | "[") as opening, _Next.VALUE | _Next.VALUE_OR_CLOSE:
                if len(self._open) == MAX_DEPTH:
                    return None
                self._open.append(opening)
                self._next = _Next.KEY_OR_CLOSE if opening == "{" else _Next.VALUE_OR_CLOSE
            case ":", _Next.COLON:
                self._next = _Next.VALUE
            case ",", _Next.COMMA_OR_CLOSE:
                self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
            case (
                ("}" | "]") as closing,
                _Next.KEY_OR_CLOSE | _Next.VALUE_OR_CLOSE | _Next.COMMA_OR_CLOSE,
            ) if _CLOSING[self._open[-1]] == closing:
                self._open.pop()
                self._after_value()
            case _, _Next.VALUE | _Next.VALUE_OR_CLOSE:
                return (yield from self._scalar(reader))
            case _:
                return None
        return reader.take(1)

    def _scalar(self, reader: Reader) -> Reading[str | None]:
        text = yield from reader.run(_SCALAR_RUN, MAX_SCALAR)
        if len(text) > MAX_SCALAR or not _SCALAR.fullmatch(text):
            return None
        self._after_value()
        return reader.take(len(text))

    def _after_string(self) -> None:
        if self._open and self._open[-1] == "key":
            self._open.pop()
            self._next = _Next.COLON
        else:
            self._after_value()

    def _after_value(self) -> None:
        self.done = not self._open
        self._next = _Next.COMMA_OR_CLOSE

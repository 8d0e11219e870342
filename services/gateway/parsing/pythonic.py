"""Calls as a list of Python calls: [f(a=1), g(b="x")]; Llama 4 and others write them so."""

from __future__ import annotations

import re

from services.gateway.parsing.python_literals import read_keywords
from services.gateway.parsing.reader import Reading
from services.gateway.parsing.tool_parser import ToolParser

START, END = "<|python_start|>", "<|python_end|>"
MAX_NAME = 64
MAX_CALL = 200_000  # characters between the brackets of a call
MAX_DEPTH = 100
_NAME = re.compile(r"[\w.:-]+")
_PLAIN = re.compile(r"""[^"'()\[\]{},]+""")
_STRINGS = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonicParser(ToolParser):
    """The text begins with the list. A call's arguments are given when all of it has come."""

    def read_calls(self) -> Reading[None]:
        reader = self.reader
        yield from reader.space()
        yield from reader.literal(START)
        if (yield from reader.literal("[")) and (yield from self._list()):
            yield from self.end_mark(END)
            yield from reader.space()
            reader.settle()
        else:
            self.release()

    def _list(self) -> Reading[bool]:
        while True:
            yield from self.reader.space()
            if not (yield from self._call()):
                return False
            yield from self.reader.space()
            if not (yield from self.reader.literal(",")):
                return (yield from self.reader.literal("]"))

    def _call(self) -> Reading[bool]:
        name = yield from self.reader.run(_NAME, MAX_NAME)
        if name not in self.names:
            return False
        self.reader.take(len(name))
        if not (yield from self.reader.literal("(")):
            return False
        texts = yield from self._argument_texts()
        arguments = None if texts is None else read_keywords(texts)
        if arguments is None:
            return False
        self.begin(name)
        self.argue(arguments)
        return True

    def _argument_texts(self) -> Reading[list[str] | None]:
        """Up to the closing bracket; None if it does not come."""
        reader, closing, size = self.reader, [")"], 0
        arguments: list[list[str]] = [[]]
        while closing:
            if not (yield from reader.some()) or size > MAX_CALL or len(closing) > MAX_DEPTH:
                return None
            if plain := reader.match(_PLAIN):
                piece = reader.take(len(plain[0]))
            elif reader.peek in _STRINGS:
                piece = yield from self._string(reader.peek)
            else:
                piece = reader.take(1)
                if piece in _CLOSING:
                    closing.append(_CLOSING[piece])
                elif piece != "," and piece != closing.pop():
                    return None
            size += len(piece)
            if piece == "," and len(closing) == 1:
                arguments.append([])
            else:
                arguments[-1].append(piece)
        arguments[-1].pop()  # the bracket
        return ["".join(pieces) for pieces in arguments]

    def _string(self, quote: str) -> Reading[str]:
        """A string with its quotes, or as much of it as there is."""
        reader = self.reader
        pieces = [reader.take(1)]
        while (yield from reader.some()):
            if found := reader.match(_STRINGS[quote]):
                pieces.append(reader.take(len(found[0])))
                continue
            pieces.append(reader.take(1))
            if pieces[-1] == quote:
                break
            if (yield from reader.some()):  # what the backslash escapes
                pieces.append(reader.take(1))
        return "".join(pieces)

"""Calls as Mistral's models write them.

Older ones: [TOOL_CALLS] [{"name": ..., "arguments": ...}, ...]; newer ones, once for each call:
[TOOL_CALLS]name[ARGS]{...}, some with [CALL_ID]id before the arguments.
"""

from __future__ import annotations

import re

from services.gateway.parsing.call_object import CallObject
from services.gateway.parsing.reader import Reading
from services.gateway.parsing.tool_parser import ToolParser

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 64
_NAME = re.compile(r"[\w.:-]+")


class MistralParser(ToolParser):
    def read_calls(self) -> Reading[None]:
        while (yield from self.until(MARK)):
            yield from self.reader.space()
            listed = yield from self.reader.literal("[")
            if (yield from self._listed() if listed else self._named()):
                yield from self.reader.space()
                self.reader.settle()
            else:
                self.release()

    def _listed(self) -> Reading[bool]:
        while True:
            yield from self.reader.space()
            if not (yield from CallObject(self).read()):
                return False
            yield from self.reader.space()
            if not (yield from self.reader.literal(",")):
                return (yield from self.reader.literal("]"))

    def _named(self) -> Reading[bool]:
        reader = self.reader
        name = yield from reader.run(_NAME, MAX_NAME)
        if name not in self.names:
            return False
        reader.take(len(name))
        if (yield from reader.literal(CALL_ID)):
            reader.take(len((yield from reader.run(_NAME, MAX_NAME))))
        yield from reader.literal(ARGS)
        yield from reader.space()
        if not (yield from reader.some()) or reader.peek != "{":
            return False
        self.begin(name)
        return (yield from self.arguments())

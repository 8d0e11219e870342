"""Calls as Llama 3 writes them: {"name": ..., "parameters": ...}, with semicolons between."""

from __future__ import annotations

from services.gateway.parsing.call_object import CallObject
from services.gateway.parsing.reader import Reading
from services.gateway.parsing.tool_parser import ToolParser

MARK = "<|python_tag|>"
BETWEEN = ";"


class Llama3JsonParser(ToolParser):
    """Calls at the beginning of the text, or after the mark."""

    def read_calls(self) -> Reading[None]:
        yield from self.reader.space()
        yield from self.reader.literal(MARK)
        yield from self._calls()
        while (yield from self.until(MARK)):
            yield from self._calls()

    def _calls(self) -> Reading[None]:
        while True:
            yield from self.reader.space()
            if not (yield from CallObject(self).read()):
                self.release()
                return
            yield from self.reader.space()
            if not (yield from self.reader.literal(BETWEEN)):
                break
            yield from self.reader.space()
            if not (yield from self.reader.some()):
                break
        self.reader.settle()

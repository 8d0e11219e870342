"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

from __future__ import annotations

from services.gateway.parsing.call_object import CallObject
from services.gateway.parsing.reader import Reading
from services.gateway.parsing.tool_parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Marked calls anywhere in the text; a mark that is not closed is forgiven."""

    def read_calls(self) -> Reading[None]:
        while (yield from self.until(OPEN)):
            yield from self._marked()

    def _marked(self) -> Reading[None]:
        """Usually one call; some models put several between two marks."""
        yield from self.reader.space()
        while (yield from CallObject(self).read()):
            yield from self.reader.space()
            if (yield from self.end_mark(CLOSE)):
                yield from self.reader.space()
                break
            if not (yield from self.reader.some()) or self.reader.peek != "{":
                break
        else:
            self.release()
        self.reader.settle()

"""What the parsers of tool calls have in common, whatever a model's way to write them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Set

from services.gateway.output import Content, ToolArguments, ToolCall
from services.gateway.parsing.json_value import JsonValue
from services.gateway.parsing.part_parser import PartParser
from services.gateway.parsing.reader import Reading


class ToolParser(PartParser):
    """Reads one answer: what is a call of a known function, as its format has it, is a call.

    Anything else is content, character for character; only the white space around calls is
    theirs. The arguments of a call are given as they come: if they go wrong, what came before
    stays arguments, and content goes on from there.
    """

    def __init__(self, names: Set[str], new_id: Callable[[], str]) -> None:
        super().__init__()
        self.names = names
        self._new_id = new_id
        self._count = 0

    def read(self) -> Reading[None]:
        yield from self.read_calls()
        while (yield from self.reader.some()):
            self.reader.rest()
            self.release()

    @abstractmethod
    def read_calls(self) -> Reading[None]:
        """Read calls and the content between them; all that is left is content."""

    # --- for the formats

    def until(self, mark: str) -> Reading[bool]:
        """Content up to the mark, which is read, too; false at the end."""
        while True:
            before, found = self.reader.until(mark)
            if before:
                self.give(Content(before))
            if found or self.reader.ended:
                return found
            yield

    def release(self) -> None:
        """What was read, and has become nothing else, is content."""
        text = self.reader.settle()
        if text and not (self._count and text.isspace()):
            self.give(Content(text))

    def begin(self, name: str) -> None:
        """A call; what was read so far is part of it."""
        self.give(ToolCall(self._count, self._new_id(), name))
        self._count += 1
        self.reader.settle()

    def argue(self, text: str) -> None:
        """More of the arguments of the call that has begun."""
        if text:
            self.give(ToolArguments(self._count - 1, text))
        self.reader.settle()

    def arguments(self) -> Reading[bool]:
        """An object, the arguments of the call that has begun, as it comes; false if it breaks."""
        value = JsonValue()
        while not value.done:
            token = yield from value.token(self.reader)
            if token is None:
                if self.reader.ended:  # cut off: half a word is still best placed here
                    self.argue(self.reader.rest())
                return False
            self.argue(token)
        return True

    def end_mark(self, mark: str) -> Reading[bool]:
        """The mark behind a call; half of one at the end of the text is no content, either."""
        if (yield from self.reader.literal(mark)):
            return True
        if self.reader.ended and self.reader.is_begun(mark):
            self.reader.rest()
            return True
        return False

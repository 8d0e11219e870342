"""What a model writes to itself before it answers: <think>...</think> and its like."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.output import OutputParser, Part, Reasoning
from services.gateway.parsing.part_parser import PartParser
from services.gateway.parsing.reader import Reading


@dataclass(frozen=True, slots=True)
class Marks:
    """Around a model's reasoning."""

    open: str
    close: str


class ReasoningParser(PartParser):
    """Reasoning comes first, if it comes; all that follows is for the parser of the answer."""

    def __init__(self, marks: Marks, answer: OutputParser, *, inside: bool) -> None:
        """`inside`: the prompt, or the model's habit, has opened the reasoning already."""
        super().__init__()
        self._marks = marks
        self._answer = answer
        self._inside = inside
        self._over = False

    def feed(self, text: str) -> list[Part]:
        return self._answer.feed(text) if self._over else super().feed(text)

    def flush(self) -> list[Part]:
        return super().flush() + self._answer.flush()

    def read(self) -> Reading[None]:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.literal(self._marks.open)) or self._inside:
            yield from reader.space()
            reader.settle()
            yield from self._reasoning()
        self._over = True
        self.give(*self._answer.feed(reader.settle() + reader.rest()))
        reader.settle()

    def _reasoning(self) -> Reading[None]:
        found = False
        while not found:
            before, found = self.reader.until(self._marks.close)
            if before:
                self.give(Reasoning(before))
            if self.reader.ended:
                break
            if not found:
                yield
        yield from self.reader.space()
        self.reader.settle()

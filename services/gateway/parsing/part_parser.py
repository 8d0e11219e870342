"""A parser of answers that is written as a generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import groupby

from services.gateway.output import Content, Part, Reasoning, ToolArguments, ToolCall
from services.gateway.parsing.reader import Reader, Reading


class PartParser(ABC):
    """An OutputParser: `read` reads on whenever there is more, and gives parts."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._parts: list[Part] = []
        self._reading = self.read()

    def feed(self, text: str) -> list[Part]:
        self.reader.push(text)
        return self._go_on()

    def flush(self) -> list[Part]:
        self.reader.ended = True
        return self._go_on()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read all of the text, to its end."""

    def give(self, *parts: Part) -> None:
        self._parts += parts

    def _go_on(self) -> list[Part]:
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return merged(parts)


def merged(parts: list[Part]) -> list[Part]:
    """The same with the texts of neighbours joined."""
    if len(parts) < 2:
        return parts
    found: list[Part] = []
    for _, neighbours in groupby(parts, _kind):
        first, *others = neighbours
        match first:
            case ToolCall():
                found += [first, *others]
            case ToolArguments(index, text):
                found.append(ToolArguments(index, text + _text(others)))
            case Content(text):
                found.append(Content(text + _text(others)))
            case Reasoning(text):
                found.append(Reasoning(text + _text(others)))
    return found


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, ToolCall | ToolArguments) else 0


def _text(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if not isinstance(part, ToolCall))

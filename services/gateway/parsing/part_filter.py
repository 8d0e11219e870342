"""Answers of which not every part is given."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.output import Content, OutputParser, Part, ToolArguments, ToolCall


class PartFilter:
    """Gives what of another parser's parts is wanted."""

    def __init__(self, parser: OutputParser, wanted: Callable[[Part], bool]) -> None:
        self._parser = parser
        self._wanted = wanted

    def feed(self, text: str) -> list[Part]:
        return list(filter(self._wanted, self._parser.feed(text)))

    def flush(self) -> list[Part]:
        return list(filter(self._wanted, self._parser.flush()))


def of_first_call(part: Part) -> bool:
    """All but further calls."""
    return not isinstance(part, ToolCall | ToolArguments) or part.index == 0


def of_calls(part: Part) -> bool:
    """No content: where calls are forced, it is but half of one that was cut off."""
    return not isinstance(part, Content)

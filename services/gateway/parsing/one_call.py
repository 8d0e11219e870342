"""An answer may hold one call only."""

from __future__ import annotations

from services.gateway.output import OutputParser, Part, ToolArguments, ToolCall


class OneCallParser:
    """Drops all calls but the first."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Part]:
        return _first(self._parser.feed(text))

    def flush(self) -> list[Part]:
        return _first(self._parser.flush())


def _first(parts: list[Part]) -> list[Part]:
    return [
        part
        for part in parts
        if not (isinstance(part, ToolCall | ToolArguments) and part.index > 0)
    ]

"""What an answer's text consists of: content, reasoning, tool calls.

A parser reads one choice's text as it comes, in pieces of any size, and gives parts; what they
are together does not depend on how the text was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins; the `index`th of its choice."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | ToolCall | ToolArguments


class OutputParser(Protocol):
    """Of one choice."""

    def feed(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]:
        """What was held back, at the end."""


class PlainParser:
    """All of it is content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        return []

"""The functions that a model may call, and what of them it has to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class ToolChoice(Enum):
    AUTO = auto()  # the model decides
    REQUIRED = auto()  # at least one call
    NAMED = auto()  # exactly one call, of the one function


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the client's."""

    name: str
    parameters: dict[str, Any] | None = None  # JSON schema of an object
    strict: bool = False  # arguments must fit the schema


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What of a request concerns calls; a request without them has none."""

    functions: list[Function]  # that may be called: the one, if it was named
    choice: ToolChoice = ToolChoice.AUTO
    parallel: bool = True  # more than one call in an answer

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def forced(self) -> bool:
        return self.choice is not ToolChoice.AUTO

    @property
    def many(self) -> bool:
        return self.parallel and self.choice is not ToolChoice.NAMED

    @property
    def strict(self) -> bool:
        return any(function.strict for function in self.functions)

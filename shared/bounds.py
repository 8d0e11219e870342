"""Bounds that a field's type states, as `Annotated[int, Within(0, 7)]`: frames are held to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_BLOCKS = 1 << 22  # of an executor's KV cache: whoever plans for it keeps lists of them
MAX_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Within:
    """Of a number, both ends included."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class AtMost:
    """The length of a text in characters, or of a list."""

    length: int


Count: TypeAlias = Annotated[int, Within(0, INT32_MAX)]
Number: TypeAlias = Annotated[int, Within(0, INT64_MAX)]  # one that rises, or is drawn
Share: TypeAlias = Annotated[float, Within(0, 1)]
Name: TypeAlias = Annotated[str, AtMost(255)]  # of an instance, as discovery knows it
Line: TypeAlias = Annotated[str, AtMost(65536)]  # said of something, for people to read

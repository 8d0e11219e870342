"""Tokens that came before their `Open`."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from shared.types import Handle, Incarnation

MAX_TOKENS = 16384  # an `Open` is late by an iteration or two, for one batch's rows


class Row(NamedTuple):
    """One row of a StepResult."""

    position: int
    token_id: int
    finish: int


class EarlyTokens:
    """Keeps the newest tokens of requests that are yet to be opened."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[Incarnation, Handle], list[Row]] = OrderedDict()
        self.size = 0

    def keep(self, epoch: Incarnation, handle: Handle, row: Row) -> int:
        """Returns how many older tokens had to go."""
        self._rows.setdefault((epoch, handle), []).append(row)
        self.size += 1
        if self.size <= MAX_TOKENS:
            return 0
        _, dropped = self._rows.popitem(last=False)
        self.size -= len(dropped)
        return len(dropped)

    def claim(self, epoch: Incarnation, handle: Handle) -> list[Row]:
        """The tokens of a request that is opened now, in the order of their coming."""
        rows = self._rows.pop((epoch, handle), [])
        self.size -= len(rows)
        return rows

"""What came of tokens before their `Open`."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from services.detokenizer.details import Entry
from shared.messages import Embedding
from shared.types import Handle, Incarnation

LARGE_BYTES = 256
MAX_WAITING = 65536  # an `Open` is late by an iteration or two, for one batch's rows


class Row(NamedTuple):
    """One row of a StepResult."""

    position: int
    token_id: int
    finish: int


Item = Row | Entry | Embedding


class EarlyTokens:
    """Keeps the newest of what came for requests that are yet to be opened."""

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[Incarnation, Handle], list[Item]] = OrderedDict()
        self.size = 0

    def keep(self, epoch: Incarnation, handle: Handle, item: Item) -> int:
        """Returns how many older tokens had to go."""
        self._items.setdefault((epoch, handle), []).append(item)
        self.size += _weight(item)
        if self.size <= MAX_WAITING:
            return 0
        _, dropped = self._items.popitem(last=False)
        self.size -= sum(map(_weight, dropped))
        return num_tokens(dropped)

    def claim(self, epoch: Incarnation, handle: Handle) -> list[Item]:
        """What waited for a request that is opened now, in the order of its coming."""
        items = self._items.pop((epoch, handle), [])
        self.size -= sum(map(_weight, items))
        return items


def _weight(item: Item) -> int:
    """1 for what is small, as nearly all is."""
    content = item.vector if isinstance(item, Embedding) else getattr(item, "values", b"")
    return 1 + len(content) // LARGE_BYTES


def num_tokens(items: list[Item]) -> int:
    return sum(isinstance(item, Row) for item in items)

"""A heap whose items can be removed, or ranked anew, wherever they are."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Rank = TypeVar("Rank", int, tuple[bool, float, int])

SLACK = 64  # stale entries that are not worth a tidy-up


class LazyHeap(Generic[Item, Rank]):
    """The item of the smallest rank first, of equals the one that was ranked first.

    What was removed or ranked anew leaves a stale entry, which goes when it surfaces or when more
    than half of the entries are stale: every operation is O(log n), amortised.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, int, Item]] = []
        self._current: dict[Item, tuple[Rank, int]] = {}  # the entry that counts
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._current)

    @property
    def first(self) -> Item:
        """Raises IndexError if there is none."""
        return self._entries[0][2]

    def place(self, item: Item) -> tuple[Rank, int]:
        """What sorts the items into their order; raises KeyError if it is not there."""
        return self._current[item]

    def put(self, item: Item, rank: Rank) -> None:
        """Add an item, or rank it anew."""
        self._last_number += 1
        self._current[item] = rank, self._last_number
        heappush(self._entries, (rank, self._last_number, item))
        self._tidy()

    def remove(self, item: Item) -> None:
        """Raises KeyError if it is not there."""
        del self._current[item]
        self._tidy()

    def _tidy(self) -> None:
        """Leave a current entry at the top, and not too many stale ones below."""
        if len(self._entries) > 2 * len(self._current) + SLACK:
            self._entries = [entry for entry in self._entries if self._counts(entry)]
            heapify(self._entries)
        while self._entries and not self._counts(self._entries[0]):
            heappop(self._entries)

    def _counts(self, entry: tuple[Rank, int, Item]) -> bool:
        current = self._current.get(entry[2])
        return current is not None and current[1] == entry[1]

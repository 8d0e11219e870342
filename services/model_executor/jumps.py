"""Tokens that grammars force: known before they are computed, and told of as they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Forced(NamedTuple):
    """What rows tell without having sampled it: columns, one entry a token."""

    rows: Ints  # indices of the rows, ascending
    positions: Ints
    tokens: Ints

    @property
    def num_rows(self) -> int:
        return len(np.unique(self.rows))


NOTHING_FORCED = Forced(*np.zeros((3, 0), np.int64))


class Jumps:
    """What is forced beyond the length of each slot's sequence."""

    def __init__(self, slots: int) -> None:
        self._tokens: dict[int, list[int]] = {}  # by slot, none of them empty
        self._counts = np.zeros(slots, np.int64)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def clear(self, slot: int) -> None:
        """Another sequence takes the slot, or none."""
        self._set(slot, [])

    def push(self, slot: int, tokens: list[int]) -> None:
        """These come after what is forced already."""
        self._set(slot, self._tokens.get(slot, []) + tokens)

    def extras(self, slots: Ints, most: int, budget: int) -> tuple[Ints, NDArray[np.bool_]]:
        """How many forced tokens each row computes beside its own, and which then sample.

        most: for one row; budget: for all, the first have the first choice.
        """
        forced = self._counts[slots]
        wanted = np.minimum(forced, most)
        before = np.cumsum(wanted) - wanted
        extras = np.clip(budget - before, 0, wanted)
        return extras, extras == forced

    def take(self, rows: Ints, slots: Ints, lengths: Ints, extras: Ints) -> Forced:
        """What these rows tell: what they compute of it, and if they do not sample, one more."""
        told = np.minimum(self._counts[slots], extras + 1)
        tokens: list[int] = []
        for slot, count in zip(slots.tolist(), told.tolist(), strict=True):
            if count:
                tokens += self._tokens[slot][:count]
                self._set(slot, self._tokens[slot][count:])
        firsts = np.cumsum(told) - told
        offsets = np.arange(len(tokens)) - np.repeat(firsts, told)
        positions = np.repeat(lengths, told) + offsets
        return Forced(np.repeat(rows, told), positions, np.array(tokens, np.int64))

    def _set(self, slot: int, tokens: list[int]) -> None:
        self._counts[slot] = len(tokens)
        if tokens:
            self._tokens[slot] = tokens
        else:
            self._tokens.pop(slot, None)

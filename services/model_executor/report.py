"""What an iteration tells beside its tokens, as parts of messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.messages import Embedding, Logprobs
from shared.types import Handle, Int32s, int32s_from_bytes

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Of one token a line, as in `Logprobs`; of a line's pairs the first `counts` are told."""

    slots: Ints  # [tokens]
    positions: Ints  # [tokens]
    ranks: Ints  # [tokens]
    counts: Ints  # [tokens]
    token_ids: Ints  # [tokens, any]
    values: Floats  # [tokens, any], finite


@dataclass(frozen=True, slots=True)
class Report:
    """Of all slots."""

    tables: Sequence[LogprobTable] = ()
    embeddings: dict[int, Floats] = field(default_factory=dict)  # by slot

    @property
    def slots(self) -> set[int]:
        """Those that something is told to."""
        return set(self.embeddings).union(*(table.slots.tolist() for table in self.tables))

    def logprobs(self, slots: Iterable[int], handles: NDArray[np.int32]) -> Logprobs | None:
        """What is told to these slots; `handles` are those of all slots."""
        wanted = np.fromiter(slots, np.int64)
        parts = [_flat(table, np.isin(table.slots, wanted), handles) for table in self.tables]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        if not columns or not len(columns[0]):
            return None
        entries, positions, ranks, counts, token_ids, values = columns
        return Logprobs(
            handles=_int32s(entries),
            positions=_int32s(positions),
            ranks=_int32s(ranks),
            counts=_int32s(counts),
            token_ids=_int32s(token_ids),
            values=values.astype("<f4").tobytes(),
        )

    def embedded(self, slots: Iterable[int], handles: NDArray[np.int32]) -> list[Embedding]:
        return [
            Embedding(Handle(int(handles[slot])), self.embeddings[slot].astype("<f4").tobytes())
            for slot in slots
            if slot in self.embeddings
        ]


NO_REPORT = Report()


def _int32s(column: NDArray[Any]) -> Int32s:
    return int32s_from_bytes(column.astype("<i4").tobytes())


def _flat(
    table: LogprobTable, lines: NDArray[np.bool_], handles: NDArray[np.int32]
) -> tuple[NDArray[np.int32], Ints, Ints, Ints, Ints, Floats]:
    """The columns of `Logprobs`, of some lines."""
    counts = table.counts[lines]
    told = np.arange(table.token_ids.shape[1]) < counts[:, None]
    return (
        handles[table.slots[lines]],
        table.positions[lines],
        table.ranks[lines],
        counts,
        table.token_ids[lines][told],
        table.values[lines][told],
    )

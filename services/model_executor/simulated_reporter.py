"""What the simulated accelerator says beside its tokens: always the same of the same tokens."""

from __future__ import annotations

import zlib

import numpy as np

from services.model_executor.batch import Ints, PersistentBatch, Rows
from services.model_executor.report import Floats, LogprobTable, Report
from shared.model import ModelInfo, read_json

HIDDEN_SIZE = 64  # of models that do not say theirs


class SimulatedReporter:
    """Every token has probability 1/2 and is the likeliest; words share what is left."""

    def __init__(self, batch: PersistentBatch, words: Ints, hidden_size: int) -> None:
        self._batch = batch
        self._words = words  # sorted
        self._hidden_size = hidden_size
        self._tokens = batch.tokens.numpy()  # the same memory

    def report(self, rows: Rows) -> Report:
        """Of rows whose tokens have been sampled."""
        wishes, slots = self._batch.wishes, rows.sampling_slots
        tables = [
            self._table(
                np.full(run.length, run.slot),
                np.arange(run.first, run.first + run.length),
                np.full(run.length, run.alternatives),
            )
            for run in wishes.prompts(rows.slots, rows.starts, rows.counts)
        ]
        chosen = wishes.sampled(slots)
        if len(chosen):
            own = slots[chosen]
            tables.append(self._table(own, rows.positions[chosen], wishes.logprobs[own]))
        embedded = wishes.embedded(slots, rows.positions)
        ends = zip(slots[embedded].tolist(), rows.positions[embedded].tolist(), strict=True)
        return Report(tables, {slot: self._vector(slot, end) for slot, end in ends})

    def _table(self, slots: Ints, positions: Ints, alternatives: Ints) -> LogprobTable:
        """The i-th alternative has probability 2^-i, and the first is the token itself."""
        tokens = self._tokens[slots, positions].astype(np.int64)
        most = min(int(alternatives.max()), len(self._words))
        at = np.searchsorted(self._words, tokens, side="right")[:, None] + np.arange(most - 1)
        others = self._words[at % len(self._words)]
        ids = np.column_stack([tokens, tokens, others])[:, : most + 1]
        values = -np.log(2) * np.maximum(np.arange(most + 1), 1)
        return LogprobTable(
            slots=slots,
            positions=positions,
            ranks=np.ones_like(slots),
            counts=np.minimum(alternatives, most) + 1,
            token_ids=ids,
            values=np.broadcast_to(values.astype(np.float32), ids.shape),
        )

    def _vector(self, slot: int, end: int) -> Floats:
        """A direction for each prompt."""
        name = zlib.crc32(self._tokens[slot, :end].tobytes())
        vector = np.random.default_rng(name).standard_normal(self._hidden_size, np.float32)
        return vector / np.linalg.norm(vector)


def hidden_size(info: ModelInfo) -> int:
    """The length of the model's hidden states."""
    config = read_json(info.path / "config.json")
    size = (config.get("text_config") or config).get("hidden_size")
    return size if isinstance(size, int) and size > 0 else HIDDEN_SIZE

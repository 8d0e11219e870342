"""What an iteration sampled, as messages: all of it to the scheduler, its own to a detokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.model_executor.batch import PersistentBatch, Rows
from shared.messages import StepResult
from shared.types import Incarnation, Int32s, int32s


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one plan gave, ready to be sent."""

    scheduler: StepResult
    detokenizers: dict[str, StepResult]  # by name; none without a row
    prefill_tokens: int
    decode_tokens: int


def step_output(
    epoch: Incarnation,
    step: int,
    batch: PersistentBatch,
    rows: Rows,
    tokens: Sequence[int],
    finishes: bytes,
) -> StepOutput:
    """`tokens` and `finishes` are those of the rows that sample."""
    slots = rows.sampling_slots
    handles = batch.handles[slots].tolist()
    positions = rows.positions.tolist()

    def result(indices: Sequence[int]) -> StepResult:
        return StepResult(
            epoch=epoch,
            step=step,
            handles=_take(handles, indices),
            positions=_take(positions, indices),
            token_ids=_take(tokens, indices),
            finishes=bytes([finishes[index] for index in indices]),
        )

    by_name: dict[str, list[int]] = {}
    for index, slot in enumerate(slots.tolist()):
        by_name.setdefault(batch.detokenizers[slot], []).append(index)
    decode = int(np.count_nonzero(rows.counts[rows.sampling] == 1))
    return StepOutput(
        scheduler=result(range(len(slots))),
        detokenizers={name: result(indices) for name, indices in by_name.items()},
        prefill_tokens=int(rows.counts.sum()) - decode,
        decode_tokens=decode,
    )


def _take(column: Sequence[int], indices: Sequence[int]) -> Int32s:
    return int32s([column[index] for index in indices])

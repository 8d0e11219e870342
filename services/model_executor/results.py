"""What an iteration sampled, as messages: all of it to the scheduler, its own to a detokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.model_executor.batch import PersistentBatch, Rows
from shared.messages import StepResult
from shared.types import Incarnation, Int32s, int32s


class Span(NamedTuple):
    """When something was computed, in monotonic seconds."""

    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one plan gave, ready to be sent."""

    scheduler: StepResult
    detokenizers: dict[str, StepResult]  # by name; none without a row
    prefill_tokens: int
    decode_tokens: int
    num_running: int  # sequences that go on
    span: Span


def step_output(
    epoch: Incarnation,
    step: int,
    batch: PersistentBatch,
    rows: Rows,
    tokens: Sequence[int],
    finishes: bytes,
    span: Span,
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
    return StepOutput(
        scheduler=result(range(len(slots))),
        detokenizers={name: result(indices) for name, indices in by_name.items()},
        prefill_tokens=rows.prefill_tokens,
        decode_tokens=rows.decode_tokens,
        num_running=batch.num_running,
        span=span,
    )


def _take(column: Sequence[int], indices: Sequence[int]) -> Int32s:
    return int32s([column[index] for index in indices])

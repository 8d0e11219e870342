"""What an iteration sampled, as messages: all of it to the scheduler, its own to a detokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.model_executor.batch import Ints, PersistentBatch, Rows
from services.model_executor.report import NO_REPORT, Report
from shared.messages import StepResult
from shared.types import Incarnation, Int32s, int32s, int32s_from_bytes


class Span(NamedTuple):
    """When something was computed, in monotonic seconds."""

    began: float
    ended: float


class Origin(NamedTuple):
    """Whose plan an iteration was of, and which of its iterations it was."""

    epoch: Incarnation
    step: int
    iteration: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one plan gave, ready to be sent."""

    scheduler: StepResult
    detokenizers: dict[str, StepResult]  # by name; none without a row or something told
    prefill_tokens: int
    decode_tokens: int
    num_running: int  # sequences that go on
    span: Span


def step_output(
    origin: Origin,
    batch: PersistentBatch,
    rows: Rows,
    tokens: Ints,
    finishes: bytes,
    span: Span,
    report: Report = NO_REPORT,
) -> StepOutput:
    """`tokens` and `finishes` are those of the rows that sample."""
    told = _told(rows, tokens, np.frombuffer(finishes, np.uint8))
    slots = told.slots
    columns = (batch.handles[slots], told.positions, told.tokens, told.finishes)
    detokenizers = [batch.detokenizers[slot] for slot in slots.tolist()]
    whole = _result(origin, *columns)
    by_name = dict.fromkeys(detokenizers, whole)
    if len(by_name) > 1:
        names = np.array(detokenizers)
        for name in by_name:
            own = names == name
            by_name[name] = _result(origin, *(column[own] for column in columns))
    if report is not NO_REPORT:
        _add_report(by_name, batch, report, origin)
    return StepOutput(
        scheduler=whole,
        detokenizers=by_name,
        prefill_tokens=rows.prefill_tokens,
        decode_tokens=rows.decode_tokens,
        num_running=batch.num_running,
        span=span,
    )


class _Told(NamedTuple):
    """Columns, one entry a token."""

    slots: Ints
    positions: Ints
    tokens: Ints
    finishes: NDArray[np.uint8]


def _told(rows: Rows, tokens: Ints, finishes: NDArray[np.uint8]) -> _Told:
    """What was forced and what was sampled: those of a sequence together, in order."""
    forced = rows.forced
    if not len(forced.rows):
        return _Told(rows.sampling_slots, rows.positions, tokens, finishes)
    told_by = np.concatenate([forced.rows, rows.sampling])
    order = np.argsort(told_by, kind="stable")
    return _Told(
        rows.slots[told_by[order]],
        np.concatenate([forced.positions, rows.positions])[order],
        np.concatenate([forced.tokens, tokens])[order],
        np.concatenate([np.zeros(len(forced.rows), np.uint8), finishes])[order],
    )


def _add_report(
    by_name: dict[str, StepResult], batch: PersistentBatch, report: Report, origin: Origin
) -> None:
    """Give each detokenizer its part, also those of which no row has sampled."""
    none = int32s()
    nothing = StepResult(origin.epoch, origin.step, none, none, none, b"", origin.iteration)
    slots: dict[str, list[int]] = {}
    for slot in sorted(report.slots):
        slots.setdefault(batch.detokenizers[slot], []).append(slot)
    for name, own in slots.items():
        by_name[name] = replace(
            by_name.get(name, nothing),
            logprobs=report.logprobs(own, batch.handles),
            embeddings=report.embedded(own, batch.handles),
        )


def _result(
    origin: Origin,
    handles: NDArray[np.int32],
    positions: Ints,
    tokens: Ints,
    finishes: NDArray[np.uint8],
) -> StepResult:
    return StepResult(
        epoch=origin.epoch,
        step=origin.step,
        handles=_int32s(handles),
        positions=_int32s(positions),
        token_ids=_int32s(tokens),
        finishes=finishes.tobytes(),
        iteration=origin.iteration,
    )


def _int32s(column: NDArray[Any]) -> Int32s:
    return int32s_from_bytes(column.astype("<i4").tobytes())

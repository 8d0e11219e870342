"""What every backend does with plans; how the tokens are computed is each one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from services.model_executor.batch import Ints, PersistentBatch, Rows
from services.model_executor.grammars import Grammars
from services.model_executor.report import NO_REPORT, Report
from services.model_executor.results import Origin, Span, StepOutput, step_output
from shared.grammars import read_vocabulary
from shared.messages import Announce, Plan
from shared.model import ModelInfo
from shared.types import FinishReason, Incarnation


class Computed(NamedTuple):
    """What an iteration gave for the rows that sample."""

    tokens: Ints
    broken: NDArray[np.bool_]  # rows that have no token to choose
    span: Span
    report: Report = NO_REPORT


class Backend(ABC):
    """A persistent batch, and what computes its next tokens; lives in one thread."""

    def __init__(self, limits: Announce, info: ModelInfo, device: torch.device) -> None:
        self._limits = limits
        self._batch = PersistentBatch(limits, info.eos_token_ids, device)
        self._grammars = Grammars(
            lambda: read_vocabulary(info.path, info.vocab_size, info.eos_token_ids),
            info.vocab_size,
        )

    @property
    def num_running(self) -> int:
        """Sequences that have not finished."""
        return self._batch.num_running

    def announce(self) -> Announce:
        """What this executor can hold."""
        return self._limits

    def reset(self) -> None:
        """Drop all sequences."""
        self._batch.reset()
        self._grammars.reset()

    def execute(
        self, plan: Plan, epoch: Incarnation, iteration: int = 0, arrived: float | None = None
    ) -> StepOutput:
        """Run one plan of the scheduler `epoch`; raises PlanMisfit, after which comes `reset`.

        iteration: 0, or how often its rows were run before, under its lease.
        arrived: since when it could have been run, in monotonic seconds; None: since now.
        """
        if not iteration:
            self._batch.apply(plan)
            self._grammars.apply(plan, self._batch.rules)
        self._batch.force(self._grammars.forced())
        rows = self._batch.rows(plan)
        tokens, broken, span, report = self._compute(rows, arrived)
        finishes = self._finish(rows, tokens, broken)
        self._grammars.advance(rows, tokens, finishes)
        origin = Origin(epoch, plan.step, iteration)
        return step_output(origin, self._batch, rows, tokens, finishes, span, report)

    @abstractmethod
    def _compute(self, rows: Rows, arrived: float | None) -> Computed:
        """Run the rows and put what they sample into the batch's tokens."""

    def _finish(self, rows: Rows, tokens: Ints, broken: NDArray[np.bool_]) -> bytes:
        """A FinishReason for each row that samples; the sequences that end run no more."""
        reasons = bytearray(len(tokens))
        # Nearly all go on, and only the others are looked at one by one.
        for index in np.flatnonzero(broken | self._batch.may_end(rows, tokens)).tolist():
            slot = int(rows.sampling_slots[index])
            rules, position = self._batch.rules[slot], int(rows.positions[index])
            reason = rules.reason(int(tokens[index]), position)
            if broken[index]:
                reason = FinishReason.ERROR
            if reason is not FinishReason.NONE:
                self._batch.finish(slot)
            reasons[index] = reason
        return bytes(reasons)

"""What every backend does with plans; how the tokens are computed is each one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from services.model_executor.batch import PersistentBatch, Rows
from services.model_executor.results import Span, StepOutput, step_output
from shared.messages import Announce, Plan
from shared.model import ModelInfo
from shared.types import FinishReason, Incarnation


class Computed(NamedTuple):
    """What an iteration gave for the rows that sample."""

    tokens: Sequence[int]
    broken: Sequence[bool]  # whether a row's logits are no numbers
    span: Span


class Backend(ABC):
    """A persistent batch, and what computes its next tokens; lives in one thread."""

    def __init__(self, limits: Announce, info: ModelInfo, device: torch.device) -> None:
        self._limits = limits
        self._batch = PersistentBatch(limits, info.vocab_size, info.eos_token_ids, device)

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

    def execute(self, plan: Plan, epoch: Incarnation, arrived: float | None = None) -> StepOutput:
        """Run one plan of the scheduler `epoch`; raises PlanMisfit, after which comes `reset`.

        arrived: since when it could have been run, in monotonic seconds; None: since now.
        """
        rows = self._batch.apply(plan)
        tokens, broken, span = self._compute(rows, arrived)
        slots, positions = rows.sampling_slots.tolist(), rows.positions.tolist()
        finishes = bytes(map(self._finish, slots, positions, tokens, broken))
        return step_output(epoch, plan.step, self._batch, rows, tokens, finishes, span)

    @abstractmethod
    def _compute(self, rows: Rows, arrived: float | None) -> Computed:
        """Run the rows and put what they sample into the batch's tokens."""

    def _finish(self, slot: int, position: int, token: int, broken: bool) -> FinishReason:
        """Whether a slot's sequence ends with this token; if so it runs no more."""
        reason = self._batch.rules[slot].reason(token, position)
        if broken:
            reason = FinishReason.ERROR
        if reason is not FinishReason.NONE:
            self._batch.finish(slot)
        return reason

"""Where an executor's time goes: it computes, it could compute (the bubble), or it is idle."""

from __future__ import annotations

from dataclasses import dataclass

from services.model_executor.results import Span


@dataclass(slots=True)
class Occupancy:
    """All time up to `since` is in exactly one of the three; times are monotonic seconds.

    busy    an iteration is computed
    bubble  none is, while the batch has a sequence that has not finished
    idle    none is, and the batch has no such sequence

    A sequence is in the batch from the first plan that names it until its last token is sampled.
    """

    since: float
    busy: float = 0.0
    bubble: float = 0.0
    idle: float = 0.0
    occupied: bool = False  # the batch has a sequence that has not finished

    def computed(self, span: Span, num_running: int) -> None:
        """An iteration ended, and left so many sequences."""
        self._pause(span.began)
        self.busy += max(0.0, span.ended - self.since)
        self.since = max(self.since, span.ended)
        self.occupied = num_running > 0

    def emptied(self, now: float) -> None:
        """All sequences were dropped."""
        self._pause(now)
        self.occupied = False

    def idle_until(self, now: float) -> None:
        """Count idleness that goes on; a bubble is known only when the next iteration began."""
        if not self.occupied:
            self._pause(now)

    def _pause(self, until: float) -> None:
        pause = max(0.0, until - self.since)
        if self.occupied:
            self.bubble += pause
        else:
            self.idle += pause
        self.since += pause

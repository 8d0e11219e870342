"""Plans that were sent and may still be running: how far ahead of its knowledge the scheduler is.

A plan is one iteration, and up to `lease` more of the same if nothing newer reaches the executor
in time. So what a plan will have done is certain only when a result of a later one is back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fence:
    """A point in the plans that were sent to an executor."""

    in_flight: InFlight
    step: int

    @property
    def passed(self) -> bool:
        """Whether no result of a plan before it can come any more."""
        return self.in_flight.done(self.step)


@dataclass(slots=True)
class _Sent:
    step: int
    at: float  # seconds
    lease: int  # iterations that may follow the first and were not seen yet
    jump: int  # tokens beyond one that each may compute of a sequence
    acknowledged: bool = False  # the result of the first iteration is back


class InFlight:
    """Fed with plans sent and results that come back, in the order of their steps."""

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()
        self._last_step = 0
        self._last_lease = 0

    @property
    def unacknowledged(self) -> int:
        """Plans that no result is back of."""
        return sum(not plan.acknowledged for plan in self._sent)

    @property
    def leased(self) -> int:
        """Iterations beyond the planned ones that may yet be run."""
        return sum(plan.lease for plan in self._sent)

    @property
    def jumps(self) -> int:
        """Tokens of one sequence that may have been computed beyond one an iteration."""
        return sum((plan.lease + (not plan.acknowledged)) * plan.jump for plan in self._sent)

    @property
    def due(self) -> bool:
        """Whether half of what the executor may do without a further plan is used up."""
        return 2 * self.leased <= self._last_lease

    @property
    def fence(self) -> Fence:
        """Behind the newest plan."""
        return Fence(self, self._last_step)

    @property
    def waiting_since(self) -> float | None:
        """When the oldest plan was sent that no result is back of."""
        return next((plan.at for plan in self._sent if not plan.acknowledged), None)

    def done(self, step: int) -> bool:
        """Whether no further result of this step or one before it can come."""
        return not self._sent or self._sent[0].step > step

    def send(self, step: int, lease: int, jump: int = 0, now: float = 0.0) -> None:
        self._sent.append(_Sent(step, now, lease, jump))
        self._last_step, self._last_lease = step, lease

    def receive(self, step: int, iteration: int) -> bool:
        """Take note of a result; False if the step is not under way."""
        if all(plan.step != step for plan in self._sent):
            return False
        while self._sent[0].step < step:
            self._sent.popleft()  # superseded: its lease is over
        plan = self._sent[0]
        plan.acknowledged = True
        if iteration > 0:
            plan.lease -= 1
        if plan.lease <= 0:
            self._sent.popleft()
        return True

    def clear(self) -> None:
        """The executor is gone, and with it whatever it had to do."""
        self._sent.clear()

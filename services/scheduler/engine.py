"""One executor as the scheduler sees it: what it can hold, what runs there, what is under way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.draft import Draft
from services.scheduler.in_flight import InFlight
from services.scheduler.limits import Limits
from services.scheduler.pace import Pace
from services.scheduler.planner import Planner, Waiting
from services.scheduler.prefix_cache import PrefixCacheStats
from services.scheduler.sequence import Sequence
from shared.messages import Announce, Plan, StepResult

OVERDUE_SECONDS = 1.0  # nobody waits for an executor that has not answered for so long


@dataclass(frozen=True, slots=True)
class Options:
    """How plans are made, on whatever executor."""

    run_ahead: int = 0  # plans sent before the result of the one before is back
    max_lease: int = 0  # iterations
    prefix_caching: bool = True
    max_decode_slowdown: float = math.inf


class Engine:
    """Forms plans of its own running set; who joins that is for others to say."""

    def __init__(
        self,
        name: str,
        capacity: Announce,
        options: Options,
        steps: Iterator[int],
        cache_stats: PrefixCacheStats,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.limits = Limits(capacity)
        self.leaving = False  # it is given nobody new
        self.in_flight = InFlight()
        self.pace = Pace(options.max_decode_slowdown, capacity.max_num_batched_tokens)
        self.planner = Planner(
            name,
            capacity,
            steps,
            self.in_flight,
            self.pace,
            max_lease=options.max_lease,
            prefix_caching=options.prefix_caching,
            cache_stats=cache_stats,
        )
        self._run_ahead = options.run_ahead

    @property
    def running(self) -> dict[int, Sequence]:
        return self.planner.running

    @property
    def ready(self) -> bool:
        """Whether a further plan may be sent."""
        return self.in_flight.unacknowledged <= self._run_ahead

    def soon_ready(self, now: float) -> bool:
        """Whether its next plan can take in others, as far as can be foreseen."""
        since = self.in_flight.waiting_since
        if self.ready or since is None or now - since > OVERDUE_SECONDS:
            return False
        return self.planner.backlog < self.capacity.max_num_batched_tokens

    def suits(self, sequence: Sequence) -> bool:
        """Whether it could be the one to run a sequence that waits, had it room."""
        if self.leaving or sequence.held or not self.limits.hold(sequence):
            return False
        # Of its own, those whose results are not all back keep their place, ahead of others.
        return sequence.settled or sequence.executor == self.name

    def room_for(self, sequence: Sequence) -> list[int] | None:
        """The cached blocks of one that suits, if it can come in; else None."""
        return self.planner.room_for(sequence) if sequence.settled else None

    def begin(self, waiting: Waiting, *, invites: bool) -> Draft | None:
        """A plan in the making; None if what it may do by itself is enough."""
        renewed = self.in_flight.due or self.planner.has_retired or invites
        if self.in_flight.leased and not renewed:
            return None
        return self.planner.begin(waiting, invites=invites)

    def finish(self, draft: Draft, now: float) -> Plan | None:
        """The plan to be sent, at once; None if there is nothing to do."""
        plan = self.planner.finish(draft)
        if plan is not None:
            self.in_flight.send(plan.step, plan.lease, plan.jump, now)
            self.pace.sent(plan, now)
        return plan

    def hear(self, result: StepResult, now: float) -> bool:
        """Take note of a result; False if its step is not under way."""
        known = self.in_flight.receive(result.step, result.iteration)
        if known:
            self.pace.heard(result.step, now)
        return known

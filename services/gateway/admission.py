"""Who may come in: decided on the schedulers' credit, before anything is tokenized."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from services.gateway.errors import ApiError, invalid, overloaded, unavailable
from shared.messages import Credit

OUTAGE_SECONDS = 30.0  # so long requests are taken that must wait until the mesh is whole again
MAX_SCHEDULERS = 1024  # whose credit is kept: it may come before the link to them
ENDS = 64  # that tell how fast places come free
LONGEST_WAIT = 60  # seconds; clients take more than that for no answer at all


class Admission:
    """Holds the newest credit of each scheduler, and what it was before an outage."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.draining = False
        self.closed = False  # to all that is new
        self._clock = clock
        self._credits: dict[str, Credit] = {}
        self._last_capacity = 0  # of a whole mesh; 0: it never was
        self._outage_began: float | None = None  # None: the mesh is whole
        self._ends: deque[float] = deque(maxlen=ENDS)

    def credit(self, scheduler: str, credit: Credit) -> None:
        self._credits.pop(scheduler, None)
        self._credits[scheduler] = credit
        if len(self._credits) > MAX_SCHEDULERS:  # of those that are there, it comes again
            del self._credits[next(iter(self._credits))]

    def forget(self, scheduler: str) -> None:
        self._credits.pop(scheduler, None)

    def capacity(self, schedulers: Iterable[str]) -> int:
        """Sequences that these schedulers can hold, running and waiting; 0 without an executor."""
        known = [self._credits[name] for name in schedulers if name in self._credits]
        return sum(one.max_num_seqs + one.max_queue for one in known if one.max_num_seqs)

    def changed(self, schedulers: Iterable[str], absent: Sequence[str]) -> None:
        """Peers or credits are others now: note when the mesh was whole last."""
        capacity = 0 if absent else self.capacity(schedulers)
        if capacity:
            self._last_capacity, self._outage_began = capacity, None
        elif self._outage_began is None:
            self._outage_began = self._clock()

    def ended(self, sequences: int) -> None:
        """So many places have come free."""
        self._ends.extend([self._clock()] * sequences)

    def retry_after(self, in_flight: int) -> int:
        """Seconds until about all who wait now have a place, if places come free as of late.

        Spread by half of it, or all who were refused together would come together again.
        """
        waiting = sum(credit.waiting for credit in self._credits.values())
        known = waiting + sum(credit.running for credit in self._credits.values())
        if not self._ends or not waiting:
            return 1
        held = in_flight * (self._clock() - self._ends[0]) / len(self._ends)  # seconds, each place
        seconds = held * waiting / known * random.uniform(0.5, 1.5)
        return min(max(math.ceil(seconds), 1), LONGEST_WAIT)

    @property
    def _lent(self) -> int:
        """What counts as capacity during a short outage."""
        began = self._outage_began
        short = began is not None and self._clock() - began < OUTAGE_SECONDS
        return self._last_capacity if short else 0

    def problem(
        self, new: int, in_flight: int, schedulers: Iterable[str], absent: Sequence[str] = ()
    ) -> ApiError | None:
        """Why `new` sequences do not fit beside those in flight.

        Returned, not raised: what a traceback holds on to is more than all the rest of a refusal.
        """
        if self.closed:
            return unavailable("The server is shutting down.")
        capacity = 0 if absent else self.capacity(schedulers)
        capacity = capacity or self._lent
        if absent and not capacity:
            return unavailable(f"The server is not ready: no {', '.join(absent)} is connected.")
        if capacity == 0:
            return unavailable("The server is not ready: no model executor is connected yet.")
        if new > capacity:
            return invalid(
                f"The request asks for {new} sequences; the server holds at most {capacity}.",
                "n",
            )
        if in_flight + new > capacity:
            message = f"The server is full: {in_flight} of {capacity} sequences are in its hands."
            return overloaded(message, self.retry_after(in_flight))
        return None

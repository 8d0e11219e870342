"""Who may come in: decided on the schedulers' credit, before anything is tokenized."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.gateway.errors import invalid, overloaded, unavailable
from shared.messages import Credit


class Admission:
    """Holds the newest credit of each scheduler."""

    def __init__(self) -> None:
        self.draining = False
        self._credits: dict[str, Credit] = {}

    def credit(self, scheduler: str, credit: Credit) -> None:
        self._credits[scheduler] = credit

    def forget(self, scheduler: str) -> None:
        self._credits.pop(scheduler, None)

    def capacity(self, schedulers: Iterable[str]) -> int:
        """Sequences that these schedulers can hold, running and waiting; 0 without an executor."""
        known = [self._credits[name] for name in schedulers if name in self._credits]
        return sum(one.max_num_seqs + one.max_queue for one in known if one.max_num_seqs)

    def check(
        self, new: int, in_flight: int, schedulers: Iterable[str], absent: Sequence[str] = ()
    ) -> None:
        """Raises ApiError if `new` sequences do not fit beside those in flight."""
        if self.draining:
            raise unavailable("The server is shutting down.")
        if absent:
            raise unavailable(f"The server is not ready: no {', '.join(absent)} is connected.")
        capacity = self.capacity(schedulers)
        if capacity == 0:
            raise unavailable("The server is not ready: no model executor is connected yet.")
        if new > capacity:
            raise invalid(
                f"The request asks for {new} sequences; the server holds at most {capacity}.",
                "n",
            )
        if in_flight + new > capacity:
            raise overloaded(
                f"The server is full: {in_flight} of {capacity} sequences are in its hands."
            )

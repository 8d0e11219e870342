"""Which scheduler an executor belongs to: it is for the executor to say.

Every scheduler tells all executors whom it has. An executor joins one that has the fewest, and
stays until that one is lost; or until another has fewer by two. Then of the scheduler that has most
the last executor moves: all executors see the same, so never more than one moves for one reason.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence


class Belonging:
    """Fed with what schedulers say; decides, and is told of what came of it."""

    def __init__(self, name: str) -> None:
        self.scheduler: str | None = None  # ours
        self._name = name
        self._rosters: dict[str, list[str]] = {}  # whose executors are whose

    def hear(self, scheduler: str, executors: Sequence[str]) -> bool:
        """A scheduler says whom it has. True if it is ours, and does not know us (any more)."""
        self._rosters[scheduler] = list(executors)
        return scheduler == self.scheduler and self._name not in executors

    def lose(self, scheduler: str) -> bool:
        """A scheduler is gone. True if it was ours."""
        self._rosters.pop(scheduler, None)
        ours = scheduler == self.scheduler
        if ours:
            self.scheduler = None
        return ours

    def join(self, scheduler: str) -> None:
        """We announce ourselves to this one, and to no other."""
        self.scheduler = scheduler

    def choose(self, present: Iterable[str]) -> str | None:
        """The one to join, of these; what was not heard of has no executors yet."""
        return min(present, key=self._merit, default=None)

    def better(self, present: Iterable[str]) -> str | None:
        """Where we should move to, of these; None to stay."""
        heard = [name for name in present if name in self._rosters]
        if self.scheduler not in heard or self._name not in self._rosters[self.scheduler]:
            return None
        most = max(heard, key=lambda name: (self._count(name), name))
        least = min(heard, key=self._merit)
        last = max(self._rosters[self.scheduler]) == self._name
        uneven = self._count(most) - self._count(least) >= 2
        return least if most == self.scheduler and last and uneven else None

    def _count(self, scheduler: str) -> int:
        return len(self._rosters.get(scheduler, ()))

    def _merit(self, scheduler: str) -> tuple[int, int]:
        """The least is the best; of equals, not all executors take the same."""
        return self._count(scheduler), zlib.crc32(f"{self._name} {scheduler}".encode())

"""Fair sharing between tenants: who was served least goes first.

Virtual token counters after Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024:
each tenant has a counter of the tokens that it was served, and of those with something waiting the
smallest is next. Between two tenants that both keep something waiting, the counters differ by at
most what one prompt and all that runs can cost, however their requests differ in number and size.

Nobody saves up: who comes anew is lifted to the smallest counter of those who wait, or, if nobody
waits, to that of the last who did. Beyond the paper, each one lifted is put a step behind the one
before. Else an endless stream of new tenants would hold the smallest counter down, and one that
was served before they came would never be next. So newcomers rise until they meet `SPREAD`, then
with the smallest counter, which rises as its holder is always next; both pass any given counter.
"""

from __future__ import annotations

from collections import OrderedDict

from services.scheduler.lazy_heap import LazyHeap

INPUT_WEIGHT = 1  # per token; decoding costs more than prefilling
OUTPUT_WEIGHT = 2
STEP = 16  # weighted tokens between one newcomer and the next
SPREAD = 1024  # weighted tokens that a newcomer can be behind the smallest counter, at most
MAX_IDLE = 4096  # tenants remembered with nothing waiting; of more, the oldest start anew


class TokenCounters:
    """Weighted tokens that each tenant was served, or was lifted to."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()  # the last to have waited at the end
        self._order: LazyHeap[str, int] = LazyHeap()  # of the waiting
        self._lift = 0  # where the last newcomer was put

    def __getitem__(self, tenant: str) -> int:
        return self._waiting.get(tenant, self._idle.get(tenant, self._floor))

    @property
    def next(self) -> str:
        """Whose turn it is; raises IndexError if nobody waits."""
        return self._order.first

    @property
    def _floor(self) -> int:
        """The smallest counter of those who wait."""
        if self._waiting:
            return self._waiting[self._order.first]
        return next(reversed(self._idle.values()), 0)

    def place(self, tenant: str) -> tuple[int, int]:
        """What sorts those who wait into the order of their turns."""
        return self._order.place(tenant)

    def join(self, tenant: str) -> None:
        """A tenant has something waiting now, and had nothing before."""
        lift = floor = self._floor
        if self._waiting:
            lift = min(max(floor, self._lift) + STEP, floor + SPREAD)
        counter = self._idle.pop(tenant, 0)
        if counter < lift:
            counter = self._lift = lift
        self._waiting[tenant] = counter
        self._order.put(tenant, counter)

    def leave(self, tenant: str) -> None:
        """A tenant has nothing waiting any more. What of it runs is charged on."""
        self._order.remove(tenant)
        self._idle[tenant] = self._waiting.pop(tenant)
        if len(self._idle) > MAX_IDLE:
            self._idle.popitem(last=False)

    def charge(self, tenant: str, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count tokens that a tenant was served."""
        counter = self[tenant] + INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
        if tenant in self._waiting:
            self._waiting[tenant] = counter
            self._order.put(tenant, counter)
        elif tenant in self._idle:
            self._idle[tenant] = counter

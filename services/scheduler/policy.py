"""Who is admitted first, and who gives way first when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from services.scheduler.fairness import TokenCounters
from services.scheduler.lazy_heap import LazyHeap
from shared.types import Handle

AGEING_SECONDS = 30.0  # of waiting, that count as much as one level of priority
MAX_LEVEL = 10  # priorities beyond it, either way, count as it in the queue
MAX_SETBACKS = 3  # how often a sequence may have to give way to younger ones


class Queued(Protocol):
    """What the policy must know of a sequence; it never changes while the sequence waits."""

    @property
    def handle(self) -> Handle:
        """Unique, and rising with arrival."""

    @property
    def tenant(self) -> str: ...

    @property
    def priority(self) -> int:
        """Lower is more urgent; 0 unless the client says otherwise."""

    @property
    def arrived(self) -> float:
        """Seconds, by any clock that never goes back."""


class Admitted(Protocol):
    """What the choice of a victim needs to know."""

    @property
    def handle(self) -> Handle: ...

    @property
    def priority(self) -> int: ...

    @property
    def admissions(self) -> int:
        """How often it was taken into the batch, at least 1."""


Waiter = TypeVar("Waiter", bound=Queued)
Runner = TypeVar("Runner", bound=Admitted)


class FairQueue(Generic[Waiter]):
    """Sequences that wait for a place: fair between tenants, by urgency within one.

    Between tenants the virtual token counters decide. Within a tenant, what was set back comes
    before all others, then the most urgent: `AGEING_SECONDS` of waiting count as one level of
    priority. All age alike, so the order of two never changes, and a fixed rank holds it:

        arrived + AGEING_SECONDS * priority

    So a sequence is overtaken within its tenant only by what came less than `AGEING_SECONDS` times
    the difference of their levels after it: 600 s at the very most, and not at all by its equals.
    """

    def __init__(self) -> None:
        self._sequences: dict[Handle, Waiter] = {}
        self._lines: dict[str, LazyHeap[Handle, tuple[bool, float, int]]] = {}  # by tenant
        self._counters = TokenCounters()

    def __len__(self) -> int:
        return len(self._sequences)

    def __bool__(self) -> bool:
        return bool(self._sequences)

    @property
    def first(self) -> Waiter:
        """The one to admit next; raises IndexError if there is none."""
        return self._sequences[self._lines[self._counters.next].first]

    def first_of(self, condition: Callable[[Waiter], bool]) -> Waiter | None:
        """The one to admit next of those that meet a condition."""
        if not self._sequences or condition(self.first):
            return self.first if self._sequences else None
        return min(filter(condition, self._sequences.values()), key=self._place, default=None)

    def append(self, sequence: Waiter) -> None:
        self._add(sequence, fresh=True)

    def put_back(self, sequence: Waiter) -> None:
        """Return a preempted sequence to the front of its tenant's line."""
        self._add(sequence, fresh=False)

    def remove(self, sequence: Waiter) -> None:
        """Take one out, admitted or aborted; raises KeyError if it is not there."""
        del self._sequences[sequence.handle]
        line = self._lines[sequence.tenant]
        line.remove(sequence.handle)
        if not line:
            del self._lines[sequence.tenant]
            self._counters.leave(sequence.tenant)

    def served(self, tenant: str, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charge a tenant: for a prompt at its first admission, for output as it is generated.

        An admission must cost at least one token at once, else one tenant's could all go first.
        """
        self._counters.charge(tenant, input_tokens=input_tokens, output_tokens=output_tokens)

    def _place(self, sequence: Waiter) -> tuple[object, ...]:
        line = self._lines[sequence.tenant]
        return self._counters.place(sequence.tenant), line.place(sequence.handle)

    def _add(self, sequence: Waiter, *, fresh: bool) -> None:
        line = self._lines.get(sequence.tenant)
        if line is None:
            line = self._lines[sequence.tenant] = LazyHeap()
            self._counters.join(sequence.tenant)
        self._sequences[sequence.handle] = sequence
        level = max(-MAX_LEVEL, min(sequence.priority, MAX_LEVEL))
        rank = (fresh, sequence.arrived + AGEING_SECONDS * level, sequence.handle)
        line.put(sequence.handle, rank)


def choose_victim(running: Iterable[Runner]) -> Runner:
    """Which of all that run gives up its blocks: of the lowest priority, the youngest.

    Ageing plays no part, else the urgent would have to give way to what waited long. One that was
    set back `MAX_SETBACKS` times is spared, and the youngest of all goes in its place. From then on
    it gives way only to its elders, of which there are ever fewer: so the oldest sequence is set
    back a limited number of times, any accepted one fits alone, and by induction each ends.
    Raises ValueError if nothing runs.
    """
    candidates = list(running)
    victim = max(candidates, key=lambda sequence: (sequence.priority, sequence.handle))
    if victim.admissions > MAX_SETBACKS:
        return max(candidates, key=lambda sequence: sequence.handle)
    return victim

"""The scheduler without sockets: requests in, plans out, results back in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from services.scheduler.admission import admit, invites
from services.scheduler.engine import Options
from services.scheduler.fleet import Fleet
from services.scheduler.policy import FairQueue
from services.scheduler.results import Counters, Intake
from services.scheduler.sequence import Sequence
from shared.messages import Announce, Failure, Plan, StepResult, Submit
from shared.tombstones import Tombstones
from shared.types import Handle, Int32s, RequestId, int32s

UNLIMITED = 2**31 - 1  # tokens
MAX_EXECUTOR_DEATHS = 3  # a request that ran in so many is taken for their cause

QUEUE_FULL = Failure(429, "the queue is full, try again later", code="rate_limit_exceeded")
POISON = Failure(500, f"the model executor died {MAX_EXECUTOR_DEATHS} times running this request")


class SchedulerCore:
    """All requests that have not ended, those that wait in one queue, and the executors."""

    def __init__(
        self,
        max_queue: int,
        clock: Callable[[], float],
        *,
        max_num_seqs: int = 0,
        run_ahead: int = 0,
        max_lease: int = 0,
        prefix_caching: bool = True,
        max_decode_slowdown: float = math.inf,
    ) -> None:
        """`max_num_seqs` is that of the executors to come, for as long as there were none."""
        self.counters = Counters()
        self.waiting: FairQueue[Sequence] = FairQueue()
        self.unopened: dict[RequestId, Sequence] = {}  # their detokenizer is to be told, or lost
        self.fleet = Fleet(
            Options(run_ahead, max_lease, prefix_caching, max_decode_slowdown), max_num_seqs
        )
        self.recalls = 0  # times that an executor was lost
        self._max_queue = max_queue
        self._clock = clock
        self._known: dict[RequestId, Sequence] = {}
        self._by_handle: dict[int, Sequence] = {}
        self._stranded: set[Sequence] = set()  # no executor that is here is large enough for them
        self._tombstones = Tombstones()
        self._handles = itertools.count(1)
        self._newest_opened = 0
        self._intake = Intake(self._by_handle, self.waiting, self.counters, self._drop)

    @property
    def max_queue(self) -> int:
        return self._max_queue if self.fleet else 0

    @property
    def num_requests(self) -> int:
        return len(self._known)

    def sequence(self, handle: Handle) -> Sequence:
        """Raises KeyError if it has ended."""
        return self._by_handle[handle]

    @property
    def stuck(self) -> bool:
        """Whether somebody waits for an executor that is not there."""
        return bool(self._stranded or (self._known and not self.fleet))

    def is_stuck(self, sequence: Sequence) -> bool:
        return not self.fleet or sequence in self._stranded

    def connect(self, name: str, capacity: Announce) -> list[tuple[Sequence, Failure]]:
        """Take an executor; raises ValueError if it has another model than those before.

        Returns the requests, ended, that were taken while there was none and do not fit into it.
        """
        first = not self.fleet
        self.fleet.add(name, capacity)
        sequences = list(self._known.values()) if first else []
        misfits = [(one, failure) for one in sequences if (failure := self.fleet.fit(one))]
        for sequence, _ in misfits:
            self._drop(sequence)
        self._stranded = self.fleet.strand(self._known.values())
        return misfits

    def disconnect(self, name: str, *, died: bool = True) -> list[Sequence]:
        """An executor is gone. What ran there waits to be computed again; returns the poisonous.

        It may have told the detokenizers more than us, or less. So all that it had is held back
        until they have answered recall number `recalls`.
        """
        engine = self.fleet.remove(name)
        if engine is None:
            return []
        self.recalls += 1
        victims = list(engine.running.values())
        for sequence in victims:
            sequence.executor_deaths += died
            engine.planner.preempt(sequence, self.waiting)
        engine.in_flight.clear()
        poisonous = [s for s in victims if s.executor_deaths >= MAX_EXECUTOR_DEATHS]
        for sequence in poisonous:
            self._drop(sequence)
        for sequence in self._known.values():
            if sequence.opened and sequence.executor == name:
                sequence.recall, sequence.resubmitted = self.recalls, False
        self._stranded = self.fleet.strand(self._known.values()) if self.fleet else set()
        return poisonous

    def spared(self, detokenizer: str) -> Int32s:
        """The handles there that the newest recall does not concern."""
        return int32s(
            sequence.handle
            for sequence in self._known.values()
            if sequence.route.detokenizer == detokenizer and sequence.recall != self.recalls
        )

    def recalled(self, number: int, detokenizer: str) -> None:
        """All is said: what this detokenizer did not submit again has ended there."""
        for sequence in list(self._known.values()):
            if sequence.recall == number and sequence.route.detokenizer == detokenizer:
                sequence.recall = 0
                if not sequence.resubmitted:
                    self._drop(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """It does not run until a detokenizer was told of it anew, be it another or the same."""
        if sequence.running:
            self.fleet[sequence.executor].planner.preempt(sequence, self.waiting)
        sequence.opened, sequence.retold = False, True
        sequence.recall = 0  # it will be told more than it could say
        self.unopened[sequence.request_id] = sequence

    def detokenizer_lost(self, name: str) -> int:
        """Set aside what it had; returns how much that is."""
        had = [one for one in self._known.values() if one.route.detokenizer == name]
        for sequence in had:
            self.set_aside(sequence)
        return len(had)

    def reopen(self, request_id: RequestId, detokenizer: str) -> bool:
        """Set it aside if it still is at this detokenizer; False if it is not known at all."""
        sequence = self._known.get(request_id)
        if sequence is not None and sequence.route.detokenizer == detokenizer:
            self.set_aside(sequence)
        return sequence is not None

    def name_anew(self, sequence: Sequence) -> None:
        """Tokens that overtake an `Open` seem late if a detokenizer knows of later handles."""
        if sequence.handle <= self._newest_opened:
            self.waiting.remove(sequence)
            del self._by_handle[sequence.handle]
            sequence.handle = Handle(next(self._handles))
            self._by_handle[sequence.handle] = sequence
            self.waiting.put_back(sequence)

    def opened(self, sequence: Sequence) -> None:
        """Its detokenizer was told."""
        self._newest_opened = max(self._newest_opened, sequence.handle)
        sequence.opened, sequence.retold = True, False
        del self.unopened[sequence.request_id]

    def submit(self, request: Submit) -> Sequence | Failure | None:
        """Queue a request; None if it was aborted before it came, or is known already.

        Without an executor it waits for one. One that ran before is taken even by a full queue.
        """
        if self._tombstones.claim(request.request_id):
            return None
        if (known := self._known.get(request.request_id)) is not None:
            self._resubmitted(known, request)
            return None
        if request.output_tokens is None and self._full:
            return QUEUE_FULL
        sequence = Sequence(
            request_id=request.request_id,
            handle=Handle(next(self._handles)),
            route=request.route,
            asked=request.params,
            max_tokens=UNLIMITED,
            token_ids=request.token_ids[:],
            arrived=self._clock(),
            tenant=request.tenant,
            priority=request.priority,
            cache_salt=request.cache_salt,
            num_output=request.output_tokens or 0,
        )
        if (misfit := self.fleet.fit(sequence)) is not None:
            return misfit
        self._known[request.request_id] = sequence
        self._by_handle[sequence.handle] = sequence
        self.unopened[request.request_id] = sequence
        self.waiting.append(sequence)
        return sequence

    def abort(self, request_id: RequestId) -> Sequence | None:
        """End a request wherever it is; it is remembered, for it may be on its way (again)."""
        self._tombstones.bury(request_id)
        sequence = self._known.get(request_id)
        if sequence is not None:
            self._drop(sequence)
        return sequence

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Others have these; they may come back."""
        for sequence in [self._known[one] for one in request_ids if one in self._known]:
            self._drop(sequence)

    def abort_where(self, condition: Callable[[Sequence], bool]) -> list[Sequence]:
        """End all requests that meet a condition."""
        dropped = [sequence for sequence in self._known.values() if condition(sequence)]
        for sequence in dropped:
            self._drop(sequence)
        return dropped

    def plan(self) -> list[tuple[str, Plan]]:
        """Plans to be sent now, at most one for each executor; none if there is nothing to do."""
        engines, now = self.fleet.engines, self._clock()
        drafts = {
            engine: draft
            for engine in engines
            if engine.ready
            and (draft := engine.begin(self.waiting, invites=invites(engine, self.waiting)))
        }
        admit(self.waiting, engines, drafts, now)
        plans = []
        for engine, draft in drafts.items():
            self.counters.preemptions += draft.preempted
            if (plan := engine.finish(draft, now)) is not None:
                self.counters.leases += plan.lease > 0
                plans.append((engine.name, plan))
        return plans

    def apply(self, executor: str, result: StepResult) -> None:
        """Take in what an iteration sampled; results of steps that are not under way are late."""
        engine = self.fleet.get(executor)
        if engine is not None and engine.hear(result, self._clock()):
            self._intake.take(result, engine)
        else:
            self.counters.late_tokens += len(result.handles)

    def _resubmitted(self, sequence: Sequence, request: Submit) -> None:
        """Its detokenizer says what it has: as it was asked, or because it lost the thread."""
        if request.output_tokens is None:
            return  # a repetition
        if sequence.recall:
            sequence.rewind(request.token_ids)
            sequence.resubmitted = True
            sequence.opened = False  # it may have lost the thread as well
            self.unopened[sequence.request_id] = sequence
        elif sequence.opened:
            self.set_aside(sequence)

    @property
    def _full(self) -> bool:
        return self.num_requests >= self.fleet.max_num_seqs_known + self._max_queue

    def _drop(self, sequence: Sequence) -> None:
        del self._known[sequence.request_id]
        del self._by_handle[sequence.handle]
        self.unopened.pop(sequence.request_id, None)
        self._stranded.discard(sequence)
        if sequence.running:
            self.fleet[sequence.executor].planner.release(sequence)
        else:
            self.waiting.remove(sequence)

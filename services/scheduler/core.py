"""The scheduler without sockets: requests in, plans out, results back in."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.scheduler.in_flight import InFlight
from services.scheduler.limits import Limits
from services.scheduler.pace import Pace
from services.scheduler.planner import Planner
from services.scheduler.policy import FairQueue
from services.scheduler.prefix_cache import PrefixCacheStats
from services.scheduler.sequence import NO_SLOT, Sequence
from shared.messages import Announce, Failure, Plan, StepResult, Submit
from shared.tombstones import Tombstones
from shared.types import Handle, RequestId

UNLIMITED = 2**31 - 1  # tokens
MAX_EXECUTOR_DEATHS = 3  # a request that ran in so many is taken for their cause

QUEUE_FULL = Failure(429, "the queue is full, try again later", code="rate_limit_exceeded")
POISON = Failure(500, f"the model executor died {MAX_EXECUTOR_DEATHS} times running this request")


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    late_tokens: int = 0  # of requests that ended meanwhile
    preemptions: int = 0
    leases: int = 0  # plans that bore one


class SchedulerCore:
    """Queue, running set and the plans that are under way on one executor."""

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
        """`max_num_seqs` is that of the executor to come, for as long as there was none."""
        self.counters = Counters()
        self.cache_stats = PrefixCacheStats()
        self.waiting: FairQueue[Sequence] = FairQueue()
        self.unopened: dict[RequestId, Sequence] = {}  # their detokenizer is to be told, or lost
        self._max_queue = max_queue
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._planner: Planner | None = None
        self._limits: Limits | None = None  # of the executor, while there is one
        self._fingerprint: str | None = None
        self._known: dict[RequestId, Sequence] = {}
        self._tombstones = Tombstones()
        self._by_handle: dict[int, Sequence] = {}
        self._run_ahead = run_ahead
        self._max_lease = max_lease
        self._prefix_caching = prefix_caching
        self._max_decode_slowdown = max_decode_slowdown
        self._in_flight = InFlight()
        self._handles = itertools.count(1)
        self.recalls = 0  # times that an executor was lost
        self._steps = itertools.count(1)  # of all executors: a late result never meets its number

    @property
    def connected(self) -> bool:
        return self._planner is not None

    @property
    def num_running(self) -> int:
        return len(self._planner.running) if self._planner else 0

    @property
    def max_num_seqs(self) -> int:
        return self._planner.capacity.max_num_seqs if self._planner else 0

    @property
    def max_queue(self) -> int:
        return self._max_queue if self._planner else 0

    @property
    def cache_usage(self) -> float:
        return self._planner.pool.usage if self._planner else 0.0

    @property
    def num_requests(self) -> int:
        return len(self._known)

    def running(self, handle: Handle) -> Sequence:
        """A sequence of the running set."""
        assert self._planner is not None
        return self._planner.running[handle]

    def connect(self, capacity: Announce) -> list[tuple[Sequence, Failure]]:
        """Take an executor; raises ValueError if it has another model than the one before.

        Returns the requests, ended, that were taken for the one before and do not fit into this.
        """
        if self._fingerprint not in (None, capacity.fingerprint):
            raise ValueError(
                f"executor has model {capacity.fingerprint}, requests are for {self._fingerprint}"
            )
        self._fingerprint, self._max_num_seqs = capacity.fingerprint, capacity.max_num_seqs
        self._limits = Limits(capacity)
        self._planner = Planner(
            capacity,
            self._steps,
            self._in_flight,
            Pace(self._max_decode_slowdown, capacity.max_num_batched_tokens),
            max_lease=self._max_lease,
            prefix_caching=self._prefix_caching,
            cache_stats=self.cache_stats,
        )
        fitted = [(sequence, self._limits.fit(sequence)) for sequence in self._known.values()]
        misfits = [(sequence, failure) for sequence, failure in fitted if failure is not None]
        for sequence, _ in misfits:
            self._drop(sequence)
        return misfits

    def disconnect(self) -> list[Sequence]:
        """The executor is gone. What ran is queued to be computed again; returns the poisonous.

        The executor may have told the detokenizers more than us, or less. So all is held back until
        they have answered recall number `recalls`.
        """
        if self._planner is None:
            return []
        self.recalls += 1
        victims = list(self._planner.running.values())
        for sequence in victims:
            sequence.executor_deaths += 1
            self._planner.preempt(sequence, self.waiting)
        self._planner = self._limits = None
        self._in_flight.clear()
        poisonous = [s for s in victims if s.executor_deaths >= MAX_EXECUTOR_DEATHS]
        for sequence in poisonous:
            self._drop(sequence)
        for sequence in self._known.values():
            if sequence.opened:
                sequence.recall, sequence.resubmitted = self.recalls, False
        return poisonous

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
            assert self._planner is not None
            self._planner.preempt(sequence, self.waiting)
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

    def settled(self, sequence: Sequence) -> bool:
        """Whether no result that is under way can bring tokens of what waits."""
        return not sequence.running and self._in_flight.done(sequence.held_step)

    def assign(self, sequence: Sequence, detokenizer: str) -> None:
        """Choose whom to tell of a settled sequence.

        It will be told of the tokens that are known here; those that a client wants to hear more
        of than their text it must see for itself, so they are generated again.
        """
        sequence.route = replace(sequence.route, detokenizer=detokenizer)
        if sequence.retold and sequence.asked.wants_tokens:
            sequence.rewind(sequence.token_ids[: sequence.num_prompt])

    def opened(self, sequence: Sequence) -> None:
        """Its detokenizer was told."""
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
        if self._limits is not None and (misfit := self._limits.fit(sequence)) is not None:
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

    def abort_where(self, condition: Callable[[Sequence], bool]) -> list[Sequence]:
        """End all requests that meet a condition."""
        dropped = [sequence for sequence in self._known.values() if condition(sequence)]
        for sequence in dropped:
            self._drop(sequence)
        return dropped

    def plan(self) -> Plan | None:
        """A plan to be sent now; None if enough are under way, or there is nothing to do."""
        planner, in_flight = self._planner, self._in_flight
        if planner is None or in_flight.unacknowledged > self._run_ahead:
            return None
        if in_flight.leased and not in_flight.due and not planner.news(self.waiting):
            return None
        before = planner.preemptions
        plan = planner.plan(self.waiting)
        self.counters.preemptions += planner.preemptions - before
        if plan is not None:
            in_flight.send(plan.step, plan.lease, plan.jump)
            planner.pace.sent(plan, self._clock())
            self.counters.leases += plan.lease > 0
        return plan

    def apply(self, result: StepResult) -> None:
        """Take in what an iteration sampled; results of steps that are not under way are late."""
        if self._planner is None or not self._in_flight.receive(result.step, result.iteration):
            self.counters.late_tokens += len(result.handles)
            return
        self._planner.pace.heard(result.step, self._clock())
        known, counters, prefixes = self._by_handle, self.counters, self._planner.prefixes
        block_size, unplanned = prefixes.block_size, result.iteration > 0
        jumping, newest = bool(self._planner.jumping), 0  # no handle is 0
        tenants = []  # one for each token
        hidden = 0  # tokens that only end their sequence
        for handle, position, token, finish in zip(
            result.handles, result.positions, result.token_ids, result.finishes, strict=True
        ):
            sequence = known.get(handle)
            if sequence is None or position != len(sequence.token_ids):
                continue
            if finish and not sequence.opened:
                continue  # nobody heard of its end, so that has to come again
            if position == sequence.num_prompt:
                counters.prompt_tokens += position
            sequence.token_ids.append(token)
            if sequence.slot == NO_SLOT:  # preempted meanwhile: one less to be computed again
                sequence.num_tokens += 1
            elif unplanned or (jumping and handle == newest):  # that one was planned
                sequence.num_computed += 1
                sequence.num_tokens += 1
            newest = handle
            tenants.append(sequence.tenant)
            if position // block_size > sequence.num_registered and sequence.slot != NO_SLOT:
                prefixes.register(sequence, position)
            if finish:  # any FinishReason but NONE
                hidden += sequence.asked.hidden_tokens
                self._drop(sequence)
        counters.late_tokens += len(result.handles) - len(tenants)
        counters.generation_tokens += len(tenants) - hidden
        for tenant, tokens in Counter(tenants).items():
            self.waiting.served(tenant, output_tokens=tokens)

    def _resubmitted(self, sequence: Sequence, request: Submit) -> None:
        """Its detokenizer says what it has: as it was asked, or because it lost the thread."""
        if request.output_tokens is None:
            return  # a repetition
        if sequence.recall:
            sequence.rewind(request.token_ids)
            sequence.resubmitted = True
        elif sequence.opened:
            self.set_aside(sequence)

    @property
    def _full(self) -> bool:
        return self.num_requests >= self._max_num_seqs + self._max_queue

    def _drop(self, sequence: Sequence) -> None:
        del self._known[sequence.request_id]
        del self._by_handle[sequence.handle]
        self.unopened.pop(sequence.request_id, None)
        if self._planner is not None and sequence.running:
            self._planner.release(sequence)
        else:
            self.waiting.remove(sequence)

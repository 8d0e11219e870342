"""The scheduler without sockets: requests in, plans out, results back in."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.in_flight import InFlight
from services.scheduler.pace import Pace
from services.scheduler.planner import Planner
from services.scheduler.policy import FairQueue
from services.scheduler.prefix_cache import PrefixCacheStats
from services.scheduler.sequence import NO_SLOT, Sequence
from shared.messages import Announce, Failure, Plan, StepResult, Submit
from shared.tombstones import Tombstones
from shared.types import Handle, RequestId

MAX_EXECUTOR_DEATHS = 3  # a request that ran in so many is taken for their cause

QUEUE_FULL = Failure(429, "the queue is full, try again later", code="rate_limit_exceeded")
NO_EXECUTOR = Failure(503, "no model executor is connected", code="service_unavailable")
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
        run_ahead: int = 0,
        max_lease: int = 0,
        prefix_caching: bool = True,
        max_decode_slowdown: float = math.inf,
    ) -> None:
        self.counters = Counters()
        self.cache_stats = PrefixCacheStats()
        self.waiting: FairQueue[Sequence] = FairQueue()
        self._max_queue = max_queue
        self._clock = clock
        self._planner: Planner | None = None
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
        self._fingerprint = capacity.fingerprint
        self._planner = Planner(
            capacity,
            self._steps,
            self._in_flight,
            Pace(self._max_decode_slowdown, capacity.max_num_batched_tokens),
            max_lease=self._max_lease,
            prefix_caching=self._prefix_caching,
            cache_stats=self.cache_stats,
        )
        return [
            (sequence, failure)
            for sequence in list(self._known.values())
            if (failure := self._refit(sequence)) is not None
        ]

    def disconnect(self) -> list[Sequence]:
        """The executor is gone. What ran is queued to be computed again; returns the poisonous."""
        if self._planner is None:
            return []
        victims = list(self._planner.running.values())
        for sequence in victims:
            sequence.executor_deaths += 1
            self._planner.preempt(sequence, self.waiting)
        self._planner = None
        self._in_flight.clear()
        poisonous = [s for s in victims if s.executor_deaths >= MAX_EXECUTOR_DEATHS]
        for sequence in poisonous:
            self._drop(sequence)
        return poisonous

    def submit(self, request: Submit) -> Sequence | Failure | None:
        """Queue a request; None if it was aborted before it came, or is known already."""
        if self._tombstones.claim(request.request_id) or request.request_id in self._known:
            return None
        if self._planner is None:
            return NO_EXECUTOR
        if self.num_requests >= self.max_num_seqs + self._max_queue:
            return QUEUE_FULL
        max_tokens = self._fit(len(request.token_ids), request.params.max_tokens)
        if isinstance(max_tokens, Failure):
            return max_tokens
        vocab_size = self._planner.capacity.vocab_size
        if min(request.token_ids) < 0 or max(request.token_ids) >= vocab_size:
            return Failure(400, f"token ids must be from 0 to {vocab_size - 1} here")
        sequence = Sequence(
            request_id=request.request_id,
            handle=Handle(next(self._handles)),
            route=request.route,
            asked=request.params,
            max_tokens=max_tokens,
            token_ids=request.token_ids[:],
            arrived=self._clock(),
            tenant=request.tenant,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        self._known[request.request_id] = sequence
        self._by_handle[sequence.handle] = sequence
        self.waiting.append(sequence)
        return sequence

    def abort(self, request_id: RequestId) -> Sequence | None:
        """End a request wherever it is; an unknown one is remembered, it may be on its way."""
        sequence = self._known.get(request_id)
        if sequence is None:
            self._tombstones.bury(request_id)
            return None
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

    def _fit(self, prompt: int, max_tokens: int | None, generated: int = 0) -> int | Failure:
        """`max_tokens` set to a number, or why so long a request can never be served."""
        assert self._planner is not None
        needed = generated + 1 if max_tokens is None else max_tokens
        if prompt < 1 or needed < 0:
            return Failure(400, "a request needs a prompt, and no less than 0 tokens to generate")
        room = self._planner.max_length - prompt
        if needed > room or prompt > self._planner.max_tokens_held:
            return Failure(
                400,
                f"a sequence can have {self._planner.max_length} tokens here (the KV cache holds"
                f" {self._planner.max_tokens_held}); the request needs {prompt + needed} ({prompt}"
                f" in the prompt, {needed} to generate)",
                code="context_length_exceeded",
            )
        return room if max_tokens is None else max_tokens

    def _refit(self, sequence: Sequence) -> Failure | None:
        """Hold a request to what the new executor has room for; ends it if that is too little."""
        generated = len(sequence.token_ids) - sequence.num_prompt
        max_tokens = self._fit(sequence.num_prompt, sequence.asked.max_tokens, generated)
        if isinstance(max_tokens, Failure):
            self._drop(sequence)
            return max_tokens
        sequence.limit(max_tokens)
        return None

    def _drop(self, sequence: Sequence) -> None:
        del self._known[sequence.request_id]
        del self._by_handle[sequence.handle]
        if self._planner is not None and sequence.running:
            self._planner.release(sequence)
        else:
            self.waiting.remove(sequence)

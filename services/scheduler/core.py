"""The scheduler without sockets: requests in, plans out, results back in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.scheduler.planner import Planner
from services.scheduler.sequence import Sequence
from services.scheduler.tombstones import Tombstones
from services.scheduler.waiting import WaitingQueue
from shared.messages import Announce, Failure, Plan, StepResult, Submit
from shared.sampling import SamplingParams
from shared.types import FinishReason, Handle, RequestId

MAX_EXECUTOR_DEATHS = 3  # a request that ran in so many is taken for their cause

NO_EXECUTOR = Failure(503, "no model executor is connected", code="service_unavailable")
POISON = Failure(500, f"the model executor died {MAX_EXECUTOR_DEATHS} times running this request")


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    late_tokens: int = 0  # of requests that ended meanwhile
    preemptions: int = 0


class SchedulerCore:
    """Queue, running set and the plans that are under way on one executor."""

    def __init__(self, max_queue: int, clock: Callable[[], float]) -> None:
        self.counters = Counters()
        self.waiting = WaitingQueue()
        self._max_queue = max_queue
        self._clock = clock
        self._planner: Planner | None = None
        self._fingerprint: str | None = None
        self._known: dict[RequestId, Sequence] = {}
        self._tombstones = Tombstones()
        self._in_flight: deque[int] = deque()  # steps sent, results not yet back
        self._last_handle = 0

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

    def connect(self, capacity: Announce) -> None:
        """Take an executor; raises ValueError if it has another model than the one before."""
        if self._fingerprint not in (None, capacity.fingerprint):
            raise ValueError(
                f"executor has model {capacity.fingerprint}, requests are for {self._fingerprint}"
            )
        self._fingerprint = capacity.fingerprint
        self._planner = Planner(capacity)

    def disconnect(self) -> list[Sequence]:
        """The executor is gone. What ran is queued to be computed again; returns the poisonous."""
        if self._planner is None:
            return []
        victims = list(self._planner.running.values())
        for sequence in reversed(victims):
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
        params = self._fit(request)
        if isinstance(params, Failure):
            return params
        self._last_handle += 1
        sequence = Sequence(
            request_id=request.request_id,
            handle=Handle(self._last_handle),
            route=request.route,
            params=params,
            token_ids=request.token_ids[:],
            arrived=self._clock(),
        )
        self._known[request.request_id] = sequence
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
        """The next iteration, once the one before is done; None if there is nothing to do."""
        if self._planner is None or self._in_flight:
            return None
        before = self._planner.preemptions
        plan = self._planner.plan(self.waiting)
        self.counters.preemptions += self._planner.preemptions - before
        if plan is not None:
            self._in_flight.append(plan.step)
        return plan

    def apply(self, result: StepResult) -> None:
        """Take in what a plan sampled; results of steps that are not under way are late."""
        if self._planner is None or not self._in_flight or result.step != self._in_flight[0]:
            self.counters.late_tokens += len(result.handles)
            return
        self._in_flight.popleft()
        for handle, position, token, finish in zip(
            result.handles, result.positions, result.token_ids, result.finishes, strict=True
        ):
            sequence = self._planner.running.get(Handle(handle))
            if sequence is None or position != len(sequence.token_ids):
                self.counters.late_tokens += 1
                continue
            if position == sequence.num_prompt:
                self.counters.prompt_tokens += sequence.num_prompt
            self.counters.generation_tokens += 1
            sequence.token_ids.append(token)
            if finish != FinishReason.NONE:
                self._drop(sequence)

    def _fit(self, request: Submit) -> Failure | SamplingParams:
        """The parameters with `max_tokens` set, or why the request can never be served."""
        if self._planner is None:
            return NO_EXECUTOR
        capacity = self._planner.capacity
        if self.num_requests >= capacity.max_num_seqs + self._max_queue:
            return Failure(429, "the queue is full, try again later", code="rate_limit_exceeded")
        prompt = len(request.token_ids)
        # The last token is only sampled: its KV is never stored.
        room = min(capacity.max_model_len, self._planner.max_tokens_held + 1) - prompt
        asked = 1 if request.params.max_tokens is None else request.params.max_tokens
        if asked > room:
            return Failure(
                400,
                f"the KV cache holds {self._planner.max_tokens_held} tokens; the request needs"
                f" {prompt + asked} ({prompt} in the prompt, {asked} to generate)",
                code="context_length_exceeded",
            )
        if request.params.max_tokens is None:
            return replace(request.params, max_tokens=room)
        return request.params

    def _drop(self, sequence: Sequence) -> None:
        del self._known[sequence.request_id]
        if self._planner is not None and sequence.slot is not None:
            self._planner.release(sequence)
        else:
            self.waiting.remove(sequence)

"""Whatever comes in whatever order: every plan is sound, and at the end nothing is left behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from services.scheduler.core import MAX_EXECUTOR_DEATHS, SchedulerCore
from services.scheduler.sequence import Sequence
from shared.messages import Announce, Failure, StepResult, Submit
from shared.types import RequestId
from tests.services.scheduler.core_bench import (
    ROUTE,
    assert_complete,
    assert_idle,
    open_all,
    options,
    ran,
    submit,
)
from tests.services.scheduler.strict_executor import StrictExecutor

capacities = st.builds(
    Announce,
    fingerprint=st.just("model"),
    num_blocks=st.integers(3, 16),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 24),
    max_model_len=st.integers(2, 48),
    vocab_size=st.just(1000),
)
MAX_QUEUE = 8


class Scheduling(RuleBasedStateMachine):
    """Drives a core and an executor that checks each plan."""

    ids = Bundle("ids")
    aborted_ids = Bundle("aborted_ids")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = SchedulerCore(MAX_QUEUE, clock=lambda: self.now)
        self.executor: StrictExecutor | None = None
        self.under_way: StepResult | None = None
        self.past: list[StepResult] = []
        self.live: dict[str, Sequence] = {}
        self.requests: dict[str, Submit] = {}
        self.made = 0

    @initialize(capacity=capacities)
    def connect_first(self, capacity: Announce) -> None:
        self.connect(capacity)

    @rule(
        target=ids,
        prompt=st.integers(0, 12) | st.integers(0, 40),
        max_tokens=st.none() | st.integers(0, 30),
        options=options,
    )
    def submit(self, prompt: int, max_tokens: int | None, options: dict[str, Any]) -> str:
        self.made += 1
        name = f"r{self.made}"
        self._submit(name, prompt, max_tokens, **options)
        return name

    @rule(seconds=st.sampled_from([1.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=ids)
    def submit_again(self, name: str) -> None:
        if name in self.live:
            assert self.core.submit(submit(name, 3, 3)) is None

    @rule(target=aborted_ids)
    def abort_before_it_comes(self) -> str:
        self.made += 1
        assert self.core.abort(RequestId(f"r{self.made}")) is None
        return f"r{self.made}"

    @rule(target=ids, name=consumes(aborted_ids), twice=st.booleans())
    def submit_what_was_aborted(self, name: str, twice: bool) -> object:
        assert self.core.submit(submit(name, 3, 3)) is None
        if twice:  # a tombstone stands for one request
            self._submit(name, 3, 3)
            return name
        return multiple()

    @rule(name=ids)
    def abort(self, name: str) -> None:
        expected = self.live.pop(name, None)
        assert self.core.abort(RequestId(name)) is expected
        if expected is None:  # as if it had been on its way
            assert self.core.submit(submit(name, 3, 3)) is None

    @precondition(lambda self: self.executor is not None)
    @rule()
    def plan(self) -> None:
        plan = self.core.plan()
        if self.under_way is not None:
            assert plan is None
        elif plan is not None:
            assert self.executor is not None
            self.under_way = self.executor.execute(plan)
        else:
            assert not self.live

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def apply(self) -> None:
        result, self.under_way = self.under_way, None
        assert result is not None
        self._apply(result)

    @precondition(lambda self: self.executor is not None)
    @rule(count=st.integers(1, 12))
    def iterate(self, count: int) -> None:
        for _ in range(count):
            if self.under_way is not None:
                self.apply()
            self.plan()

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def apply_late(self, data: st.DataObject) -> None:
        """A repetition, or a step that nobody asked for: nothing comes of it."""
        result = data.draw(st.sampled_from(self.past))
        if data.draw(st.booleans()):
            result = replace(result, step=result.step + 1000)
        before = self._totals()
        self.core.apply(result)
        assert self._totals() == before

    @precondition(lambda self: self.executor is not None)
    @rule(heard=st.booleans(), told=st.booleans())
    def lose_executor(self, heard: bool, told: bool) -> None:
        """The last result reached the scheduler (`heard`) or not, and the detokenizer (`told`)."""
        journals = self._journals(self.under_way if told else None)
        if heard and self.under_way is not None:
            self.apply()
        ran = {name: s for name, s in self.live.items() if s.running}
        deaths = {name: s.executor_deaths for name, s in ran.items()}
        poisonous = self.core.disconnect()
        assert {s.request_id for s in poisonous} == {
            name for name, count in deaths.items() if count + 1 == MAX_EXECUTOR_DEATHS
        }
        for sequence in poisonous:
            del self.live[sequence.request_id]
        if self.under_way is not None:
            self.past.append(self.under_way)
        self.executor = self.under_way = None
        assert self.core.plan() is None
        poison = {sequence.request_id for sequence in poisonous}
        self._resubmit([one for one in journals if one.request_id not in poison])

    def _journals(self, told: StepResult | None) -> list[Submit]:
        """What the detokenizer has of each request that has not ended there."""
        rows = {} if told is None else dict(zip(told.handles, told.finishes, strict=True))
        return [
            ran(request, s.output_tokens + (s.handle in rows))
            for name, s in self.live.items()
            if not rows.get(s.handle)
            for request in [self.requests[name]]
        ]

    def _resubmit(self, journals: list[Submit]) -> None:
        for journal in journals:
            outcome = self.core.submit(journal)
            assert not isinstance(outcome, Failure)
            if outcome is not None:  # its end was heard, but not told
                assert journal.request_id not in self.live
                self.live[journal.request_id] = outcome
        open_all(self.core)
        self.core.recalled(self.core.recalls, ROUTE.detokenizer)
        kept = {journal.request_id for journal in journals}
        self.live = {name: s for name, s in self.live.items() if name in kept}

    @precondition(lambda self: self.executor is None)
    @rule(capacity=capacities)
    def connect(self, capacity: Announce) -> None:
        self.executor, self.capacity = StrictExecutor(capacity), capacity
        for sequence, failure in self.core.connect(capacity):
            assert failure.status == 400
            del self.live[sequence.request_id]

    @invariant()
    def the_books_balance(self) -> None:
        core, running = self.core, [s for s in self.live.values() if s.running]
        assert core.num_requests == len(self.live)
        assert core.num_running == len(running)
        assert len(core.waiting) == len(self.live) - len(running)
        if self.executor is not None:
            held = len({block for s in running for block in s.blocks})
            num_blocks = self.executor.capacity.num_blocks
            assert core.cache_usage == 1 - (num_blocks - held) / num_blocks

    @invariant()
    def of_equals_the_old_run_before_the_new(self) -> None:
        equals: dict[tuple[str, int], list[bool]] = {}
        for sequence in sorted(self.live.values(), key=lambda s: s.handle):
            equals.setdefault((sequence.tenant, sequence.priority), []).append(sequence.running)
        for running in equals.values():
            assert running == sorted(running, reverse=True)

    def teardown(self) -> None:
        if self.executor is None:
            self.connect(CAPACITY_AT_THE_END)
        limit = 20 + sum(s.num_prompt + s.max_tokens + 1 for s in self.live.values()) * (
            1 + len(self.live)
        )
        for _ in range(limit):
            if self.under_way is not None:
                self.apply()
            if not self.live:
                break
            self.plan()
        assert not self.live
        assert_idle(self.core)

    def _submit(self, name: str, prompt: int, max_tokens: int | None, **options: Any) -> None:
        request = submit(name, prompt, max_tokens, seed=self.made % 2, **options)
        self.requests[name] = request
        outcome = self.core.submit(request)
        open_all(self.core)
        assert outcome is not None
        expected = self._status(prompt, max_tokens)
        if isinstance(outcome, Failure):
            assert outcome.status == expected
        else:
            assert expected is None
            self.live[name] = outcome

    def _status(self, prompt: int, max_tokens: int | None) -> int | None:
        """By which status this must be refused; None if it must be taken."""
        capacity = self.capacity
        if len(self.live) >= capacity.max_num_seqs + MAX_QUEUE:
            return 429
        if self.executor is None:
            return None  # whether it fits will be seen
        tokens = 1 if max_tokens is None else max_tokens
        fits = prompt + max(tokens, 1) - 1 <= capacity.num_blocks * capacity.block_size
        if prompt < 1 or not fits or prompt + tokens > capacity.max_model_len:
            return 400
        return None

    def _apply(self, result: StepResult) -> None:
        before = {name: len(s.token_ids) for name, s in self.live.items()}
        told = Counter(result.handles)
        finishes = dict(zip(result.handles, result.finishes, strict=True))
        self.core.apply(result)
        self.past.append(result)
        for name, sequence in list(self.live.items()):
            assert len(sequence.token_ids) == before[name] + told[sequence.handle]
            if finishes.get(sequence.handle):
                assert_complete(sequence)
                del self.live[name]

    def _totals(self) -> tuple[object, ...]:
        counters = self.core.counters
        tokens = {name: list(s.token_ids) for name, s in self.live.items()}
        return counters.generation_tokens, counters.prompt_tokens, tokens


CAPACITY_AT_THE_END = Announce("model", 3, 4, 2, 7, 20, 1000)
TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)

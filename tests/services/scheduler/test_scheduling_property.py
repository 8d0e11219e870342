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
    """Drives a core and executors that check each plan."""

    ids = Bundle("ids")
    aborted_ids = Bundle("aborted_ids")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = SchedulerCore(MAX_QUEUE, clock=lambda: self.now)
        self.names: list[str] = []  # of all executors, present and lost
        self.executors: dict[str, StrictExecutor] = {}
        self.under_way: dict[str, StepResult] = {}
        self.past: list[tuple[str, StepResult]] = []
        self.live: dict[str, Sequence] = {}
        self.requests: dict[str, Submit] = {}
        self.made = 0

    @initialize(first=st.lists(capacities, min_size=1, max_size=3))
    def connect_first(self, first: list[Announce]) -> None:
        self.names = [f"executor.{number}" for number in range(len(first))]
        for name, capacity in zip(self.names, first, strict=True):
            self._connect(name, capacity)

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

    @rule()
    def plan(self) -> None:
        plans = self.core.plan()
        for name, plan in plans:
            assert name not in self.under_way
            self.under_way[name] = self.executors[name].execute(plan)
        if not self.under_way:
            assert all(self.core.is_stuck(sequence) for sequence in self.live.values())

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        self._apply(data.draw(st.sampled_from(sorted(self.under_way))))

    @rule(count=st.integers(1, 12))
    def iterate(self, count: int) -> None:
        for _ in range(count):
            for name in list(self.under_way):
                self._apply(name)
            self.plan()

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def apply_late(self, data: st.DataObject) -> None:
        """A repetition, or a step that nobody asked for: nothing comes of it."""
        name, result = data.draw(st.sampled_from(self.past))
        if data.draw(st.booleans()):
            result = replace(result, step=result.step + 1000)
        before = self._totals()
        self.core.apply(name, result)
        assert self._totals() == before

    @precondition(lambda self: self.executors)
    @rule(data=st.data(), heard=st.booleans(), told=st.booleans())
    def lose_executor(self, data: st.DataObject, heard: bool, told: bool) -> None:
        """The last result reached the scheduler (`heard`) or not, and the detokenizer (`told`)."""
        lost = data.draw(st.sampled_from(sorted(self.executors)))
        result = self.under_way.get(lost)
        journals = self._journals(result if told else None)
        if heard and result is not None:
            self._apply(lost)
        ran = {name: s for name, s in self.live.items() if s.running and s.executor == lost}
        deaths = {name: s.executor_deaths for name, s in ran.items()}
        others = {s for s in self.live.values() if s.running} - set(ran.values())
        poisonous = self.core.disconnect(lost)
        assert {s.request_id for s in poisonous} == {
            name for name, count in deaths.items() if count + 1 == MAX_EXECUTOR_DEATHS
        }
        assert all(s.running and not s.held for s in others)
        for sequence in poisonous:
            del self.live[sequence.request_id]
        if (result := self.under_way.pop(lost, None)) is not None:
            self.past.append((lost, result))
        del self.executors[lost]
        for sequence in poisonous:
            journals.pop(sequence.handle, None)
        self._resubmit(journals)

    def _journals(self, told: StepResult | None) -> dict[int, Submit]:
        """What the detokenizer has of each request that has not ended there, by handle."""
        rows = {} if told is None else dict(zip(told.handles, told.finishes, strict=True))
        return {
            s.handle: ran(self.requests[name], s.output_tokens + (s.handle in rows))
            for name, s in self.live.items()
            if not rows.get(s.handle)
        }

    def _resubmit(self, journals: dict[int, Submit]) -> None:
        """It answers a recall."""
        spared = set(self.core.spared(ROUTE.detokenizer))
        for handle in journals.keys() - spared:
            journal = journals[handle]
            outcome = self.core.submit(journal)
            assert not isinstance(outcome, Failure) or outcome.status == 400  # the large one left
            if isinstance(outcome, Sequence):  # its end was heard, but not told
                assert journal.request_id not in self.live
                self.live[journal.request_id] = outcome
        open_all(self.core)
        self.core.recalled(self.core.recalls, ROUTE.detokenizer)
        kept = {journal.request_id for journal in journals.values()}
        self.live = {name: s for name, s in self.live.items() if name in kept}

    @precondition(lambda self: len(self.executors) < len(self.names))
    @rule(capacity=capacities)
    def connect(self, capacity: Announce) -> None:
        self._connect(min(set(self.names) - self.executors.keys()), capacity)

    def _connect(self, name: str, capacity: Announce) -> None:
        self.executors[name] = StrictExecutor(capacity)
        for sequence, failure in self.core.connect(name, capacity):
            assert failure.status == 400
            del self.live[sequence.request_id]

    @invariant()
    def the_books_balance(self) -> None:
        core, running = self.core, [s for s in self.live.values() if s.running]
        assert core.num_requests == len(self.live)
        assert core.fleet.num_running == len(running)
        assert len(core.waiting) == len(self.live) - len(running)
        held = len({(s.executor, block) for s in running for block in s.blocks})
        num_blocks = sum(one.capacity.num_blocks for one in self.executors.values())
        if num_blocks:
            assert core.fleet.cache_usage == 1 - (num_blocks - held) / num_blocks

    @precondition(lambda self: len(self.names) == 1)  # else the new may fit where the old do not
    @invariant()
    def of_equals_the_old_run_before_the_new(self) -> None:
        equals: dict[tuple[str, int], list[bool]] = {}
        for sequence in sorted(self.live.values(), key=lambda s: s.handle):
            equals.setdefault((sequence.tenant, sequence.priority), []).append(sequence.running)
        for running in equals.values():
            assert running == sorted(running, reverse=True)

    def teardown(self) -> None:
        self._connect("the largest", LARGEST)
        limit = 20 + sum(s.num_prompt + s.max_tokens + 1 for s in self.live.values()) * (
            1 + len(self.live)
        )
        for _ in range(limit):
            if not self.live:
                break
            self.iterate(1)
        for name in list(self.under_way):
            self._apply(name)
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
        capacities = [executor.capacity for executor in self.executors.values()]
        if len(self.live) >= self.core.fleet.max_num_seqs_known + MAX_QUEUE:
            return 429
        if not capacities:
            return None  # whether it fits will be seen
        tokens = 1 if max_tokens is None else max_tokens
        if prompt >= 1 and any(
            prompt + max(tokens, 1) - 1 <= one.num_blocks * one.block_size
            and prompt + tokens <= one.max_model_len
            for one in capacities
        ):
            return None
        return 400

    def _apply(self, executor: str) -> None:
        result = self.under_way.pop(executor)
        before = {name: len(s.token_ids) for name, s in self.live.items()}
        told = Counter(result.handles)
        finishes = dict(zip(result.handles, result.finishes, strict=True))
        self.core.apply(executor, result)
        self.past.append((executor, result))
        for name, sequence in list(self.live.items()):
            assert len(sequence.token_ids) == before[name] + told[sequence.handle]
            if finishes.get(sequence.handle):
                assert_complete(sequence)
                del self.live[name]

    def _totals(self) -> tuple[object, ...]:
        counters = self.core.counters
        tokens = {name: list(s.token_ids) for name, s in self.live.items()}
        return counters.generation_tokens, counters.prompt_tokens, tokens


LARGEST = Announce("model", 12, 4, 2, 7, 48, 1000)
TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)

"""Plans ahead of results, and leases: sound plans and the same tokens, however messages cross.

The channel to the executor and back is a queue each; whoever is slow, the other goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from math import inf
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler import planner
from services.scheduler.core import SchedulerCore
from services.scheduler.sequence import Sequence
from shared.messages import Announce, Failure, Plan, StepResult, Submit
from shared.types import Handle, RequestId
from tests.services.scheduler.core_bench import (
    ROUTE,
    assert_complete,
    assert_idle,
    options,
    resubmission,
    submit,
)
from tests.services.scheduler.strict_executor import VOCAB_SIZE, StrictExecutor

capacities = st.builds(
    Announce,
    fingerprint=st.just("model"),
    num_blocks=st.integers(3, 24) | st.just(300),  # with room for leases and jumps, or without
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 24),
    max_model_len=st.integers(2, 48),
    vocab_size=st.just(VOCAB_SIZE),
)
MAX_QUEUE = 8


class Channel:
    """An executor, and what is on its way to it and back."""

    def __init__(self, capacity: Announce) -> None:
        self.executor = StrictExecutor(capacity, ahead=True)
        self.plans: deque[Plan] = deque()
        self.results: deque[StepResult] = deque()
        self._lease: Plan | None = None  # may be repeated
        self._iteration = 0

    def execute(self) -> None:
        """The next plan; with none there, the newest once more if its lease lasts."""
        if self.plans:
            self._lease, self._iteration = self.plans.popleft(), 0
            result = self.executor.execute(self._lease)
        elif self._lease is not None and self._iteration < self._lease.lease:
            self._iteration += 1
            result = self.executor.repeat(self._lease, self._iteration)
        else:
            return
        if not result.handles:
            self._lease = None  # no row of it goes on
        self.results.append(result)


class RunAhead(RuleBasedStateMachine):
    """A core and executors with time between them."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: dict[str, Channel] = {}  # by the executor's name
        self.live: dict[str, Sequence] = {}
        self.made = 0
        self.now = 0.0
        self.patches = ExitStack()

    @initialize(
        capacity=capacities,
        executors=st.integers(1, 3),
        run_ahead=st.integers(0, 2),
        max_lease=st.sampled_from([0, 1, 3, 16, 64]),
        max_decode_slowdown=st.sampled_from([1.0, 2.0, inf]),
        jump=st.sampled_from([1, 3, planner.JUMP]),
    )
    def connect(
        self,
        capacity: Announce,
        executors: int,
        run_ahead: int,
        max_lease: int,
        max_decode_slowdown: float,
        jump: int,
    ) -> None:
        self.patches.enter_context(patch.object(planner, "JUMP", jump))
        self.core = SchedulerCore(
            MAX_QUEUE,
            clock=lambda: self.now,
            run_ahead=run_ahead,
            max_lease=max_lease,
            max_decode_slowdown=max_decode_slowdown,
        )
        self.run_ahead = run_ahead
        for number in range(executors):
            self._connect(f"executor.{number}", capacity)

    @rule(data=st.data(), heard=st.booleans())
    def lose_an_executor(self, data: st.DataObject, heard: bool) -> None:
        """With all that was under way, heard by detokenizers or not; another takes its place."""
        name = self._draw(data)
        channel = self.channels[name]
        for sequence in self.core.disconnect(name):
            del self.live[sequence.request_id]  # it ran in too many
        results = channel.results if heard else ()
        for sequence in [one for one in self.live.values() if one.recall]:
            request = resubmission(sequence)
            if _hear(request, sequence.handle, results):
                del self.live[sequence.request_id]
            else:
                assert self.core.submit(request) is None
        for detokenizer in (ROUTE.detokenizer, "another"):
            self.core.recalled(self.core.recalls, detokenizer)
        self._connect(name, channel.executor.capacity)

    @rule(prompt=st.integers(1, 12), max_tokens=st.integers(0, 30), options=options)
    def submit(self, prompt: int, max_tokens: int, options: dict[str, Any]) -> None:
        self.made += 1
        name = f"r{self.made}"
        seed = self.made % 2  # so that answers are alike, too
        outcome = self.core.submit(submit(name, prompt, max_tokens, seed=seed, **options))
        if not isinstance(outcome, Failure):
            assert outcome is not None
            self.live[name] = outcome

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose_a_detokenizer(self, data: st.DataObject) -> None:
        """Of some sequence; others go on, and it does when it was opened anew."""
        sequence = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        assert self.core.reopen(sequence.request_id, sequence.route.detokenizer)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.core.abort(RequestId(name)) is self.live.pop(name)

    @rule()
    def plan(self) -> None:
        for sequence in list(self.core.unopened.values()):
            if sequence.settled:
                sequence.assign("another")
                self.core.opened(sequence)
        for _ in range(self.run_ahead + 2):
            plans = self.core.plan()
            if not plans:
                return
            for name, plan in plans:
                self.channels[name].plans.append(plan)
        raise AssertionError("more plans than may be under way")

    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        self.channels[self._draw(data)].execute()

    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        self._apply(self._draw(data))

    @rule(count=st.integers(1, 30))
    def all_work(self, count: int) -> None:
        for _ in range(count):
            self.plan()
            for name, channel in self.channels.items():
                channel.execute()
                self._apply(name)

    @rule(count=st.integers(1, 20))
    def the_scheduler_stands_still(self, count: int) -> None:
        for channel in self.channels.values():
            for _ in range(count):
                channel.execute()

    @rule(data=st.data(), count=st.integers(1, 20))
    def one_executor_stands_still(self, data: st.DataObject, count: int) -> None:
        still = self._draw(data)
        for _ in range(count):
            self.plan()
            for name in self.channels.keys() - {still}:
                self.channels[name].execute()
                self._apply(name)

    @invariant()
    def the_books_balance(self) -> None:
        running = [s for s in self.live.values() if s.running]
        assert self.core.num_requests == len(self.live)
        assert self.core.fleet.num_running == len(running)
        assert len(self.core.waiting) == len(self.live) - len(running)

    def teardown(self) -> None:
        with self.patches:
            if hasattr(self, "core"):
                self._finish()

    def _finish(self) -> None:
        needed = sum(s.num_prompt + s.max_tokens + 1 for s in self.live.values())
        for _ in range(60 + 4 * needed * (1 + len(self.live))):
            if not self.live:
                break
            self.all_work(1)
        assert not self.live
        for _ in range(4):  # what tells the executor that nothing is left
            self.all_work(1)
        assert_idle(self.core)

    def _draw(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.channels)))

    def _connect(self, name: str, capacity: Announce) -> None:
        self.channels[name] = Channel(capacity)
        assert self.core.connect(name, capacity) == []

    def _apply(self, executor: str) -> None:
        if not (results := self.channels[executor].results):
            return
        result = results.popleft()
        self.now += (1 + len(result.handles)) / 16
        self.core.apply(executor, result)
        finishes = dict(zip(result.handles, result.finishes, strict=True))
        for name, sequence in list(self.live.items()):
            if finishes.get(sequence.handle) and sequence.opened:
                assert_complete(sequence)
                del self.live[name]


def _hear(request: Submit, handle: Handle, results: Iterable[StepResult]) -> bool:
    """Add to what its detokenizer submits what these tell of it; whether it ended with them."""
    tokens = request.token_ids
    for result in results:
        rows = zip(result.handles, result.positions, result.token_ids, result.finishes, strict=True)
        for owner, position, token, finish in rows:
            if owner == handle and position == len(tokens):
                tokens.append(token)
                if finish:
                    return True
    return False


TestRunAhead = RunAhead.TestCase
TestRunAhead.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

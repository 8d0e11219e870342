"""Who is admitted where: by what is cached and what is free; nobody waits beside an idle one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.admission import IMBALANCE
from services.scheduler.core import SchedulerCore
from services.scheduler.sequence import Sequence
from shared.messages import Announce
from tests.services.scheduler.core_bench import CAPACITY, ROUTE, open_all, submit
from tests.services.scheduler.strict_executor import StrictExecutor

ROOMY = replace(CAPACITY, num_blocks=400, max_num_seqs=32, max_num_batched_tokens=64)


class Fleet:
    """A core and its executors, each of which answers when it is told to."""

    def __init__(self, *capacities: Announce, run_ahead: int = 0) -> None:
        self.core = SchedulerCore(100, clock=lambda: self.now, run_ahead=run_ahead)
        self.now = 0.0
        self.executors: dict[str, StrictExecutor] = {}
        self.under_way: dict[str, list[object]] = {}
        for number, capacity in enumerate(capacities):
            name = f"executor.{number}"
            self.executors[name] = StrictExecutor(capacity, ahead=True)
            assert self.core.connect(name, capacity) == []

    def submit(self, name: str, *args: int, **options: object) -> Sequence:
        sequence = self.core.submit(submit(name, *args, **options))  # type: ignore[arg-type]
        assert isinstance(sequence, Sequence)
        open_all(self.core)
        return sequence

    def plan(self) -> None:
        for name, plan in self.core.plan():
            result = self.executors[name].execute(plan)
            self.under_way.setdefault(name, []).append(result)

    def answer(self, name: str) -> None:
        for result in self.under_way.pop(name):
            self.core.apply(name, result)  # type: ignore[arg-type]

    def run(self, *requests: Sequence) -> None:
        while any(one.request_id in self.core._known for one in requests):
            self.plan()
            for name in list(self.under_way):
                self.answer(name)


def test_a_burst_is_shared_out_evenly() -> None:
    fleet = Fleet(ROOMY, ROOMY, ROOMY)
    for number in range(12):
        fleet.submit(f"r{number}", 4, 20, first=100 * number)
    fleet.plan()
    assert [len(one.slots) for one in fleet.executors.values()] == [4, 4, 4]


def test_a_prompt_goes_where_it_is_cached() -> None:
    fleet = Fleet(ROOMY, ROOMY)
    first = fleet.submit("first", 40, 4)
    other = fleet.submit("other", 40, 4, first=500)
    fleet.run(first, other)
    homes = {0: first.executor, 500: other.executor}
    assert len(set(homes.values())) == 2
    for number in range(6):
        for begin, home in homes.items():
            again = fleet.submit(f"again {number} {begin}", 48, 4, first=begin)
            fleet.run(again)
            assert again.executor == home and again.num_cached >= 40


def test_what_all_begin_with_is_soon_cached_everywhere() -> None:
    fleet = Fleet(ROOMY, ROOMY)
    fleet.run(fleet.submit("first", 40, 2))
    for number in range(2 * IMBALANCE):
        fleet.submit(f"r{number}", 44, 40, seed=number)
        fleet.plan()
        for name in list(fleet.under_way):
            fleet.answer(name)
    counts = sorted(len(engine.running) for engine in fleet.core.fleet.engines)
    assert counts[1] - counts[0] <= IMBALANCE and counts[0] > 0


def test_a_cached_prompt_waits_for_a_plan_but_not_for_a_dead_executor() -> None:
    fleet = Fleet(ROOMY, ROOMY)
    first = fleet.submit("first", 40, 2)
    fleet.run(first)
    home, (other,) = first.executor, {*fleet.executors} - {first.executor}
    fleet.submit("at home", 40, 30)
    fleet.submit("elsewhere", 4, 30, first=700)
    fleet.plan()
    assert set(fleet.under_way) == {home, other}
    again = fleet.submit("again", 44, 4)
    fleet.answer(other)
    fleet.plan()  # the other one takes nobody: home has it all
    assert not again.running
    fleet.now += 2.0  # no answer for so long
    fleet.answer(other)
    fleet.plan()
    assert again.executor == other


def test_a_cached_prompt_does_not_wait_while_another_executor_is_idle() -> None:
    fleet = Fleet(ROOMY, ROOMY)
    first = fleet.submit("first", 40, 2)
    fleet.run(first)
    fleet.submit("at home", 40, 30)
    fleet.plan()
    again = fleet.submit("again", 44, 4)
    fleet.plan()
    assert again.running and again.executor != first.executor


def test_what_fits_only_the_larger_goes_there_and_lets_others_by() -> None:
    small = replace(ROOMY, num_blocks=8)  # 32 tokens
    fleet = Fleet(small, replace(small, num_blocks=24, max_num_seqs=1))
    first = fleet.submit("first", 60, 8)
    fleet.plan()
    assert first.executor == "executor.1"
    large, little = fleet.submit("large", 50, 10), fleet.submit("little", 4, 4, first=900)
    fleet.answer("executor.1")
    fleet.plan()
    assert (large.running, little.executor) == (False, "executor.0")
    fleet.run(first, large, little)
    assert large.executor == "executor.1"


def test_what_no_executor_can_hold_any_more_waits_for_one_that_can() -> None:
    small = replace(ROOMY, num_blocks=8)
    fleet = Fleet(small, ROOMY)
    large = fleet.submit("large", 60, 8)
    fleet.plan()
    fleet.core.disconnect("executor.1")
    fleet.core.recalled(fleet.core.recalls, ROUTE.detokenizer)
    assert large.request_id not in fleet.core._known  # its detokenizer had nothing of it
    assert fleet.core.connect("executor.1", ROOMY) == []
    large = fleet.submit("large again", 60, 8)
    assert not fleet.core.is_stuck(large)
    fleet.core.disconnect("executor.1")
    assert fleet.core.is_stuck(large)
    assert fleet.core.connect("executor.2", ROOMY) == []
    assert not fleet.core.is_stuck(large)


def test_others_go_on_when_one_is_lost() -> None:
    fleet = Fleet(ROOMY, ROOMY)
    sequences = [fleet.submit(f"r{number}", 4, 20, first=100 * number) for number in range(6)]
    fleet.plan()
    lost = [one for one in sequences if one.executor == "executor.0"]
    kept = [one for one in sequences if one.executor == "executor.1"]
    fleet.core.disconnect("executor.0")
    assert all(one.held for one in lost) and not any(one.held for one in kept)
    assert sorted(fleet.core.spared(ROUTE.detokenizer)) == [one.handle for one in kept]
    fleet.answer("executor.1")
    fleet.plan()
    assert all(one.running for one in kept)


def test_another_model_is_refused_with_both_named() -> None:
    fleet = Fleet(ROOMY)
    with pytest.raises(ValueError, match=f"another.*{ROOMY.fingerprint}"):
        fleet.core.connect("executor.1", replace(ROOMY, fingerprint="another"))

"""Executors spread over schedulers: evenly, whatever comes in whatever order, and then rest."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.model_executor.belonging import Belonging


class Schedulers:
    """They tell executors whom they have; all that is said is on its way for a while."""

    def __init__(self, executors: int, schedulers: int) -> None:
        self.executors = [Belonging(f"executor.{number}") for number in range(executors)]
        self.rosters: dict[str, set[str]] = {}
        self.moves = 0
        self._said: dict[tuple[str, int], list[tuple[str, ...]]] = {}
        for number in range(schedulers):
            self.start(f"scheduler.{number}")

    def start(self, scheduler: str) -> None:
        self.rosters[scheduler] = set()
        self._publish(scheduler)

    def kill(self, scheduler: str) -> None:
        del self.rosters[scheduler]
        for number, executor in enumerate(self.executors):
            self._said.pop((scheduler, number), None)
            executor.lose(scheduler)

    def _publish(self, scheduler: str) -> None:
        for number in range(len(self.executors)):
            said = self._said.setdefault((scheduler, number), [])
            said.append(tuple(sorted(self.rosters[scheduler])))

    def step(self, data: st.DataObject) -> bool:
        """Somebody hears something, and acts on it; False if all is said and done."""
        waiting = sorted(edge for edge, said in self._said.items() if said)
        if waiting:
            scheduler, number = data.draw(st.sampled_from(waiting))
            executor = self.executors[number]
            again = executor.hear(scheduler, self._said[scheduler, number].pop(0))
            self._act(executor, f"executor.{number}", again)
            return True
        homeless = [one for one in self.executors if one.scheduler is None]
        for executor in homeless:
            self._act(executor, f"executor.{self.executors.index(executor)}", again=False)
        return bool(homeless and self.rosters)

    def _act(self, executor: Belonging, name: str, again: bool) -> None:
        former = executor.scheduler
        seek = executor.choose if former is None else executor.better
        target = seek(self.rosters)
        if target is not None:
            if former is not None:
                self.moves += 1
                self.rosters[former].discard(name)
                self._publish(former)
            executor.join(target)
        elif not again or former is None:
            return
        assert executor.scheduler is not None
        self.rosters[executor.scheduler].add(name)
        self._publish(executor.scheduler)


@given(data=st.data(), executors=st.integers(0, 6), schedulers=st.integers(1, 4))
def test_they_spread_evenly_and_then_rest(
    data: st.DataObject, executors: int, schedulers: int
) -> None:
    world = Schedulers(executors, schedulers)
    for _ in range(data.draw(st.integers(0, 6))):
        for _ in range(data.draw(st.integers(0, 30))):
            world.step(data)
        name = f"scheduler.{data.draw(st.integers(0, schedulers - 1))}"
        if name not in world.rosters:
            world.start(name)
        elif len(world.rosters) > 1:
            world.kill(name)
    for _ in range(1000):
        if not world.step(data):
            break
    else:
        raise AssertionError("they move for ever")
    homes = Counter(executor.scheduler for executor in world.executors)
    assert None not in homes
    counts = [homes[name] for name in world.rosters]
    assert max(counts) - min(counts) <= 1
    for name, roster in world.rosters.items():
        assert len(roster) == homes[name]


def test_nobody_moves_for_a_difference_of_one() -> None:
    executor = Belonging("executor.1")
    executor.hear("scheduler.0", [])
    assert executor.choose(["scheduler.0"]) == "scheduler.0"
    executor.join("scheduler.0")
    executor.hear("scheduler.1", [])
    executor.hear("scheduler.0", ["executor.1"])
    assert executor.better(["scheduler.0", "scheduler.1"]) is None
    executor.hear("scheduler.0", ["executor.0", "executor.1"])
    assert executor.better(["scheduler.0", "scheduler.1"]) == "scheduler.1"
    assert executor.better(["scheduler.0"]) is None  # that one leaves, or cannot be reached


def test_our_scheduler_may_not_know_us() -> None:
    executor = Belonging("executor.0")
    executor.hear("scheduler.0", [])
    executor.join("scheduler.0")
    assert executor.hear("scheduler.0", [])  # maybe said before it heard of us
    assert not executor.hear("scheduler.0", ["executor.0"])
    assert not executor.hear("scheduler.1", [])
    assert executor.hear("scheduler.0", [])
    assert executor.lose("scheduler.0") and not executor.lose("scheduler.0")

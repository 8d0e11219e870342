"""Which of several schedulers gets a request."""

from __future__ import annotations

from collections import Counter

from shared.messages import Credit
from shared.schedulers import AFFINITY_TOKENS, IMBALANCE, Schedulers
from shared.types import int32s

NAMES = ["scheduler.0", "scheduler.1", "scheduler.2"]


def known(slots: int = 64, **running: int) -> Schedulers:
    schedulers = Schedulers()
    for number, name in enumerate(NAMES):
        schedulers.credit(name, Credit(slots, 100, running.get(f"s{number}", 0), 0))
    return schedulers


def prompt(number: int, length: int = 100) -> list[int]:
    return [number] * AFFINITY_TOKENS + list(range(length - AFFINITY_TOKENS))


def test_prompts_that_begin_alike_go_together_and_others_spread() -> None:
    homes = {
        number: {
            known().choose(NAMES, int32s(prompt(number, length)), "") for length in range(50, 60)
        }
        for number in range(100)
    }
    assert all(len(home) == 1 for home in homes.values())
    counts = Counter(home for (home,) in homes.values())
    assert set(counts) == set(NAMES) and min(counts.values()) > 10


def test_another_salt_is_another_prompt() -> None:
    homes = {known().choose(NAMES, int32s(prompt(1)), f"salt {number}") for number in range(50)}
    assert homes == set(NAMES)


def test_all_instances_choose_alike() -> None:
    assert len({known().choose(NAMES, int32s(prompt(7)), "") for _ in range(9)}) == 1


def test_what_begins_alike_does_not_overload_one_while_others_idle() -> None:
    schedulers = known(slots=8)
    counts = Counter(schedulers.choose(NAMES, int32s(prompt(1)), "") for _ in range(24))
    assert max(counts.values()) - min(counts.values()) <= 8 * IMBALANCE + 1


def test_a_full_one_is_passed_by() -> None:
    favourite = known().choose(NAMES, int32s(prompt(3)), "")
    assert favourite is not None
    full = known(**{f"s{favourite[-1]}": 64})
    assert full.choose(NAMES, int32s(prompt(3)), "") != favourite


def test_one_without_executors_gets_nothing_if_another_has_some() -> None:
    schedulers = known()
    for name in NAMES[1:]:
        schedulers.credit(name, Credit(0, 0, 0, 0))
    homes = {schedulers.choose(NAMES, int32s(prompt(number)), "") for number in range(30)}
    assert homes == {NAMES[0]}
    schedulers.forget(NAMES[0])
    assert schedulers.choose(NAMES[1:], int32s(prompt(1)), "") in NAMES[1:]
    assert schedulers.choose([], int32s(prompt(1)), "") is None

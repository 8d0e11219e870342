"""Virtual token counters: whose turn it is, and where a newcomer starts."""

from __future__ import annotations

import pytest

from services.scheduler.fairness import (
    INPUT_WEIGHT,
    MAX_IDLE,
    OUTPUT_WEIGHT,
    SPREAD,
    STEP,
    TokenCounters,
)


def waiting(*tenants: str) -> TokenCounters:
    counters = TokenCounters()
    for tenant in tenants:
        counters.join(tenant)
    return counters


def test_the_least_served_is_next() -> None:
    counters = waiting("a", "b")
    assert counters.next == "a"
    counters.charge("a", input_tokens=100)
    assert counters.next == "b"
    counters.charge("b", output_tokens=100)
    assert counters.next == "a"


def test_output_costs_more_than_input() -> None:
    counters = waiting("a")
    start = counters["a"]
    counters.charge("a", input_tokens=7, output_tokens=3)
    assert counters["a"] - start == 7 * INPUT_WEIGHT + 3 * OUTPUT_WEIGHT


def test_a_newcomer_starts_a_step_behind_the_least_served_of_those_who_wait() -> None:
    counters = waiting("a", "b")
    counters.charge("a", input_tokens=500)
    counters.charge("b", input_tokens=1000)
    counters.join("c")
    assert counters["c"] == counters["a"] + STEP
    counters.join("d")
    assert counters["d"] == counters["a"] + 2 * STEP


def test_newcomers_are_never_far_behind() -> None:
    counters = waiting("a", *map(str, range(2 * SPREAD // STEP)))
    counters.join("last")
    assert counters["last"] == counters["a"] + SPREAD


def test_who_comes_when_nobody_waits_starts_where_the_last_who_did_is_now() -> None:
    counters = waiting("a", "b")
    counters.charge("a", input_tokens=100)
    counters.leave("a")
    counters.leave("b")
    counters.charge("b", input_tokens=500)  # it runs
    counters.join("c")
    assert counters["c"] == counters["b"] >= 500


def test_who_comes_back_keeps_what_it_was_served() -> None:
    counters = waiting("a", "b")
    counters.charge("a", input_tokens=2000)
    counters.leave("a")
    before = counters["a"]
    counters.join("a")
    assert counters["a"] == before
    assert counters.next == "b"


def test_nobody_saves_up_while_away() -> None:
    counters = waiting("a", "b")
    counters.leave("b")
    counters.charge("a", input_tokens=5000)
    counters.join("b")
    assert counters["b"] == counters["a"] + STEP


def test_an_endless_stream_of_new_tenants_lets_those_before_them_through() -> None:
    counters = waiting("new 0", "patient")
    counters.charge("patient", input_tokens=500)
    ahead = counters["patient"] - counters["new 0"]
    for number in range(ahead // STEP + 2):
        first = counters.next
        if first == "patient":
            break
        counters.join(f"new {number + 1}")  # before its forerunner goes: one always waits
        counters.leave(first)
        counters.charge(first, input_tokens=1)
    assert counters.next == "patient"


def test_only_so_many_idle_tenants_are_remembered() -> None:
    counters = waiting("a", "b")
    counters.charge("a", input_tokens=50 * SPREAD)
    counters.leave("a")
    for number in range(MAX_IDLE):
        counters.join(str(number))
        counters.leave(str(number))
    counters.charge("a", input_tokens=1)  # it runs, but is forgotten
    counters.join("a")
    assert counters["a"] == counters["b"] + SPREAD


def test_nobody_is_next_when_nobody_waits() -> None:
    counters = waiting("a")
    counters.leave("a")
    with pytest.raises(IndexError):
        counters.next  # noqa: B018 - a property

"""Every second of an executor is busy, bubble or idle, and in one of them only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.model_executor.occupancy import Occupancy
from services.model_executor.results import Span


def test_gaps_are_bubbles_while_a_sequence_goes_on() -> None:
    occupancy = Occupancy(since=0.0)
    occupancy.computed(Span(2.0, 3.0), num_running=4)
    occupancy.computed(Span(3.5, 5.0), num_running=1)
    occupancy.computed(Span(5.0, 6.0), num_running=0)
    occupancy.computed(Span(9.0, 10.0), num_running=1)
    assert (occupancy.busy, occupancy.bubble, occupancy.idle) == (4.5, 0.5, 5.0)


def test_a_bubble_ends_when_the_sequences_are_dropped() -> None:
    occupancy = Occupancy(since=0.0)
    occupancy.computed(Span(0.0, 1.0), num_running=2)
    occupancy.idle_until(2.0)  # a question changes nothing: the next iteration may have begun
    assert (occupancy.busy, occupancy.bubble, occupancy.idle) == (1.0, 0.0, 0.0)
    occupancy.emptied(4.0)
    occupancy.idle_until(9.0)
    assert (occupancy.busy, occupancy.bubble, occupancy.idle) == (1.0, 3.0, 5.0)


lengths = st.floats(0, 10)
steps = st.tuples(st.sampled_from(["compute", "ask", "empty"]), lengths, lengths, st.integers(0, 2))


@given(st.lists(steps))
def test_nothing_is_lost_or_counted_twice(events: list[tuple[str, float, float, int]]) -> None:
    occupancy, now = Occupancy(since=0.0), 0.0
    before = (0.0, 0.0, 0.0)
    for kind, pause, length, num_running in events:
        now += pause
        if kind == "ask":
            occupancy.idle_until(now)
        elif kind == "empty":
            occupancy.emptied(now)
        else:
            occupancy.computed(Span(now, now + length), num_running)
            now += length
        after = (occupancy.busy, occupancy.bubble, occupancy.idle)
        assert all(new >= old for new, old in zip(after, before, strict=True))
        assert sum(after) == pytest.approx(occupancy.since)
        before = after
    occupancy.emptied(now)
    assert occupancy.since == pytest.approx(now)

"""The ring of events: what it keeps, and that it comes through the wire as it was."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.trace import NONE, Event, Trace, pack, unpack

int64 = st.integers(-(2**63), 2**63 - 1)
events = st.builds(Event, st.sampled_from(["plan", "iteration", ""]), *[int64] * 5)


def test_a_span_ends_now_and_an_instant_takes_no_time() -> None:
    trace = Trace()
    before = time.monotonic_ns()
    trace.span("plan", before, step=7, rows=2)
    trace.instant("entered", tokens=5)
    span, instant = trace.since(0)
    assert span[:2] == ("plan", before)
    assert span[3:] == (7, 2, NONE)
    assert instant.name == "entered"
    assert instant[3:] == (NONE, NONE, 5)
    assert before <= span.ended <= instant.began == instant.ended <= time.monotonic_ns()


@given(st.lists(events, max_size=9), st.integers(1, 9))
def test_the_newest_are_kept_in_their_order(noted: list[Event], capacity: int) -> None:
    trace = Trace(capacity)
    for event in noted:
        trace.note(*event)
    assert trace.since(-(2**63)) == noted[-capacity:]


@given(st.lists(st.integers(0, 9), max_size=9).map(sorted), st.integers(0, 10))
def test_since_a_moment_is_all_that_ended_then_or_later(ends: list[int], moment: int) -> None:
    trace = Trace()
    for end in ends:
        trace.note("plan", 0, end)
    assert [event.ended for event in trace.since(moment)] == [e for e in ends if e >= moment]


@given(st.lists(events, max_size=9))
def test_events_survive_the_wire(noted: list[Event]) -> None:
    names, packed = pack(noted)
    assert list(unpack(names, packed)) == noted
    assert len(set(names)) == len(names)
    assert len(packed) == 48 * len(noted)


@pytest.mark.parametrize("index", [-1, 1])
def test_a_name_that_is_not_there_is_refused(index: int) -> None:
    packed = index.to_bytes(8, "little", signed=True) + bytes(40)
    with pytest.raises(ValueError, match="no name"):
        list(unpack(["plan"], packed))


def test_half_an_event_is_refused() -> None:
    with pytest.raises(ValueError, match="whole"):
        list(unpack(["plan"], bytes(47)))

"""The order in which waiting sequences are admitted, and that nobody waits for ever."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.fairness import STEP
from services.scheduler.policy import AGEING_SECONDS, MAX_LEVEL, FairQueue
from tests.services.scheduler.policy_engine import Engine, Request

priorities = st.integers(-2 * MAX_LEVEL, 2 * MAX_LEVEL)
seconds = st.floats(0, 2 * AGEING_SECONDS)


def queue_of(*requests: Request) -> FairQueue[Request]:
    queue: FairQueue[Request] = FairQueue()
    for request in requests:
        queue.append(request)
    return queue


def drained(queue: FairQueue[Request]) -> list[Request]:
    order = []
    while queue:
        order.append(queue.first)
        queue.remove(order[-1])
    return order


def level(request: Request) -> int:
    return max(-MAX_LEVEL, min(request.priority, MAX_LEVEL))


def test_equals_are_admitted_as_they_came() -> None:
    requests = [Request(arrived=float(number // 2)) for number in range(6)]
    assert drained(queue_of(*requests)) == requests


def test_a_lower_priority_value_is_more_urgent() -> None:
    normal, urgent, idle = Request(), Request(priority=-1), Request(priority=1)
    assert drained(queue_of(normal, urgent, idle)) == [urgent, normal, idle]


def test_waiting_makes_up_for_priority() -> None:
    patient = Request(priority=2, arrived=0.0)
    before = Request(priority=0, arrived=2 * AGEING_SECONDS - 1)
    after = Request(priority=0, arrived=2 * AGEING_SECONDS + 1)
    assert drained(queue_of(patient, before, after)) == [before, patient, after]


def test_what_was_set_back_comes_before_all_others_the_oldest_first() -> None:
    running, urgent = [Request(), Request(arrived=1.0)], Request(priority=-5, arrived=2.0)
    queue = queue_of(urgent)
    for request in reversed(running):
        queue.put_back(request)
    assert drained(queue) == [*running, urgent]


def test_an_abort_takes_one_out_wherever_it_is() -> None:
    requests = [Request(tenant) for tenant in "aabba"]
    queue = queue_of(*requests)
    queue.remove(requests[1])
    queue.remove(requests[0])
    assert len(queue) == 3
    with pytest.raises(KeyError):
        queue.remove(requests[0])
    assert set(drained(queue)) == set(requests[2:])


def test_an_empty_queue_has_no_first() -> None:
    queue = queue_of()
    assert not queue
    with pytest.raises(IndexError):
        queue.first  # noqa: B018 - a property


def test_to_be_set_back_costs_nothing() -> None:
    first, second, other = Request("a"), Request("a"), Request("b")
    queue = queue_of(first, second, other)
    queue.remove(first)
    queue.served("a", input_tokens=100)
    queue.remove(other)
    queue.served("b", input_tokens=100)  # b came after a, so it is a step ahead of it now
    queue.append(Request("b"))
    assert queue.first is second
    queue.put_back(first)
    assert queue.first is first
    queue.remove(first)
    assert queue.first is second


@settings(deadline=None)
@given(st.lists(st.tuples(priorities, seconds), max_size=30))
def test_nobody_is_overtaken_by_what_came_much_later(asked: list[tuple[int, float]]) -> None:
    clock = 0.0
    requests = []
    for priority, pause in asked:
        clock += pause
        requests.append(Request(priority=priority, arrived=clock))
    order = drained(queue_of(*requests))
    assert len(order) == len(requests)
    for place, overtaken in enumerate(order):
        for first in order[:place]:
            head_start = first.arrived - overtaken.arrived
            assert head_start <= AGEING_SECONDS * (level(overtaken) - level(first)) + 1e-6


@settings(deadline=None)
@given(st.integers(-MAX_LEVEL, 10**9), st.integers(-(10**9), MAX_LEVEL), st.integers(1, 60))
def test_an_endless_stream_of_urgent_ones_lets_the_least_urgent_through(
    priority: int, urgent: int, pause: int
) -> None:
    """R076"""
    patient = Request(priority=priority)
    queue = queue_of(patient)
    for now in count(0, pause):
        queue.append(Request(priority=urgent, arrived=float(now)))
        first = queue.first
        queue.remove(first)
        if first is patient:
            break
        # It is overtaken only by what came until their difference was waited for.
        assert now < 2 * MAX_LEVEL * AGEING_SECONDS + pause


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 400),
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 100)), min_size=1),
)
def test_no_stream_of_other_tenants_holds_one_up_for_ever(
    served: int, stream: list[tuple[str, int]]
) -> None:
    """`stream` repeats; an unnamed tenant is a new one each time. The queue is always full."""
    room = 8
    queue = queue_of(Request("other"))
    patient = Request("patient")
    queue.append(patient)
    queue.served("patient", input_tokens=served)
    # While each of those who wait is admitted once, the smallest counter rises by a token or more,
    # and the newcomers' start by a step.
    bound = (room + 2) * (served + STEP + 2)
    for number in range(bound):
        while len(queue) < room:
            tenant, prompt = stream[number % len(stream)]
            queue.append(Request(tenant or f"new {number} {len(queue)}", prompt=prompt))
        first = queue.first
        queue.remove(first)
        if first is patient:
            return
        queue.served(first.tenant, input_tokens=first.prompt)
    raise AssertionError("starved")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=40))
def test_each_is_admitted_just_once(asked: list[tuple[str, int]]) -> None:
    engine = Engine(slots=3)
    requests = [Request(tenant, output=output) for tenant, output in asked]
    engine.submit(*requests)
    admitted: list[Request] = []
    while engine.queue:
        admitted += engine.step()
    assert sorted(request.handle for request in admitted) == [r.handle for r in requests]

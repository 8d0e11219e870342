"""Who gives way when blocks run out, and that each gets to its end all the same."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy import MAX_SETBACKS, FairQueue, choose_victim
from tests.services.scheduler.policy_engine import Request

NUM_BLOCKS = 16  # of one token each
SPARED = MAX_SETBACKS + 1


def running(*requests: Request) -> list[Request]:
    for request in requests:
        request.admissions = request.admissions or 1
    return list(requests)


def test_the_lowest_priority_gives_way_and_of_equals_the_youngest() -> None:
    old, young, urgent = Request(priority=1), Request(priority=1), Request(priority=0)
    assert choose_victim(running(old, urgent, young)) is young
    assert choose_victim(running(old, urgent)) is old
    assert choose_victim(running(urgent)) is urgent


def test_waiting_does_not_help_against_the_urgent() -> None:
    patient, urgent = Request(priority=1, arrived=0.0), Request(arrived=1e6)
    assert choose_victim(running(patient, urgent)) is patient


def test_one_set_back_often_is_spared_for_the_youngest() -> None:
    patient, urgent, young = Request(priority=9), Request(), Request(priority=1)
    patient.admissions = SPARED - 1
    assert choose_victim(running(patient, urgent, young)) is patient
    patient.admissions = SPARED
    assert choose_victim(running(patient, urgent)) is urgent
    assert choose_victim(running(patient, urgent, young)) is young
    younger = Request(priority=9, admissions=SPARED)
    assert choose_victim(running(patient, urgent, young, younger)) is younger


def test_nobody_gives_way_where_nobody_runs() -> None:
    with pytest.raises(ValueError, match="empty"):
        choose_victim(running())


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 2 * SPARED)), min_size=2))
def test_a_victim_has_had_no_more_setbacks_than_is_fair(asked: list[tuple[int, int]]) -> None:
    requests = [Request(priority=priority, admissions=times) for priority, times in asked]
    victim = choose_victim(reversed(requests))
    youngest = victim is requests[-1]
    if not youngest:
        assert victim.admissions <= MAX_SETBACKS
        assert all(victim.priority >= request.priority for request in requests)
        younger = requests[requests.index(victim) + 1 :]
        assert all(victim.priority > request.priority for request in younger)
    if len({request.priority for request in requests}) == 1:
        assert youngest


class Memory:
    """An engine short of blocks; each iteration computes one token of each sequence."""

    def __init__(self) -> None:
        self.queue: FairQueue[Request] = FairQueue()
        self.running: dict[Request, int] = {}  # tokens whose KV is there
        self.ended: list[Request] = []

    @property
    def num_free(self) -> int:
        return NUM_BLOCKS - sum(
            max(held, request.prompt + request.generated) for request, held in self.running.items()
        )

    def step(self) -> None:
        growing = [request for request, held in self.running.items() if self.decodes(request, held)]
        short = False
        while sum(request in self.running for request in growing) > self.num_free:
            victim = choose_victim(self.running)
            if victim.admissions > MAX_SETBACKS:
                assert all(request.handle <= victim.handle for request in self.running)
            del self.running[victim]
            self.queue.put_back(victim)
            short = True
        if not short:
            self.admit()
        self.compute()

    def decodes(self, request: Request, held: int) -> bool:
        return held == request.prompt + request.generated

    def admit(self) -> None:
        while self.queue:
            request = self.queue.first
            needed = request.prompt + request.generated
            if self.running and needed + len(self.running) > self.num_free:
                return
            self.queue.remove(request)
            if request.admissions == 0:
                self.queue.served(request.tenant, input_tokens=request.prompt)
            request.admissions += 1
            self.running[request] = 0

    def compute(self) -> None:
        for request, held in list(self.running.items()):
            self.running[request] = held + 1
            if held + 1 >= request.prompt + request.generated:
                request.generated += 1
                if request.generated == request.output:
                    del self.running[request]
                    self.ended.append(request)


sizes = st.tuples(st.integers(1, 8), st.integers(1, 8))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(-2, 2), sizes), min_size=1, max_size=12))
def test_all_that_fit_alone_get_to_their_end(asked: list[tuple[int, tuple[int, int]]]) -> None:
    memory = Memory()
    for priority, (prompt, output) in asked:
        memory.queue.append(Request(priority=priority, prompt=prompt, output=output))
    for _ in range(2000):
        memory.step()
        if len(memory.ended) == len(asked):
            return
    raise AssertionError("no progress")


@settings(deadline=None, max_examples=50)
@given(st.lists(sizes, min_size=1, max_size=6), st.integers(0, 5), sizes)
def test_a_stream_of_urgent_ones_lets_the_least_urgent_get_to_its_end(
    stream: list[tuple[int, int]], head_start: int, size: tuple[int, int]
) -> None:
    memory = Memory()
    patient = Request("patient", priority=5, prompt=size[0], output=size[1])
    memory.queue.append(patient)
    for iteration in count():
        while iteration >= head_start and len(memory.queue) < 4:
            prompt, output = stream[iteration % len(stream)]
            memory.queue.append(Request("urgent", prompt=prompt, output=output))
        memory.step()
        if patient in memory.ended:
            break
        assert iteration < 2000

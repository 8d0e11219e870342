"""What tenants get of an engine that serves a fair queue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, STEP
from tests.services.scheduler.policy_engine import Engine, Request

sizes = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=5)


def endless(tenant: str, sizes: list[tuple[int, int]]) -> Iterator[Request]:
    for prompt, output in cycle(sizes):
        yield Request(tenant, prompt=prompt, output=output)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 6), st.integers(1, 4))
def test_two_tenants_that_always_wait_get_the_same(
    mine: list[tuple[int, int]], theirs: list[tuple[int, int]], slots: int, lead: int
) -> None:
    engine = Engine(slots)
    supplies = {"a": endless("a", mine), "b": endless("b", theirs)}
    for _ in range(lead):  # the number of requests in the queue must not matter
        engine.submit(*[next(supplies["a"]) for _ in range(slots + 1)])
    engine.submit(*[next(supplies["b"]) for _ in range(slots + 1)])
    prompt = max(prompt for prompt, _ in mine + theirs)
    output = max(output for _, output in mine + theirs)
    bound = INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * slots * output + STEP
    for _ in range(100):
        for request in engine.step():
            engine.submit(next(supplies[request.tenant]))
        assert abs(engine.served.get("a", 0) - engine.served.get("b", 0)) <= bound


@settings(deadline=None)
@given(sizes, st.integers(1, 6), st.integers(0, 30))
def test_a_thousand_requests_of_one_tenant_hardly_delay_a_single_one_of_another(
    sizes: list[tuple[int, int]], slots: int, steps: int
) -> None:
    engine = Engine(slots)
    supply = endless("many", sizes)
    engine.submit(*[next(supply) for _ in range(1000)])
    for _ in range(steps):
        engine.step()
    single = Request("one")
    engine.submit(single)
    ahead: list[Request] = []
    while single not in ahead:
        ahead += engine.step()
    ahead = ahead[: ahead.index(single)]
    # What went before it cost at most the step, but for the last, which was still below.
    assert sum(request.prompt for request in ahead[:-1]) <= STEP

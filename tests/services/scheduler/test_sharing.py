"""Priorities and fair shares in the core: who is admitted, who gives way."""

from __future__ import annotations

from services.scheduler.core import SchedulerCore
from tests.services.scheduler.core_bench import CAPACITY, NAME, Bench, assert_complete, submit


def test_the_urgent_enter_first_and_equals_as_they_came() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("running", 3, 4)
    bench.step()
    for name, priority in (("low", 5), ("plain", 0), ("urgent", -2), ("plain too", 0)):
        bench.submit(name, 3, 2, priority=priority)
    bench.run()
    assert bench.ended == ["running", "urgent", "plain", "plain too", "low"]


def test_a_crowd_of_one_tenant_hardly_delays_another() -> None:
    bench = Bench(max_queue=400, max_num_seqs=2)
    for number in range(300):
        bench.submit(f"crowd{number}", 5, 8, tenant="crowd")
    for _ in range(20):
        bench.step()
    bench.submit("single", 5, 8, tenant="other")
    before = len(bench.plans)
    while "single" not in bench.ended:
        bench.step()
    assert len(bench.plans) - before <= 8 + 8 + 1  # until a slot is free, then its own tokens


def test_tenants_are_charged_for_what_they_were_served() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("running", 3, 2)
    bench.step()
    for number in range(3):
        bench.submit(f"long{number}", 5, 30, tenant="long")
        bench.submit(f"short{number}", 5, 3, tenant="short")
    bench.run()
    order = bench.ended[1:]
    assert order.index("short2") < order.index("long1")


def test_a_prompt_is_charged_as_far_as_it_is_computed() -> None:
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=64)
    bench.submit("running", 3, 2)
    bench.step()
    for number in range(3):
        bench.submit(f"long{number}", 50, 1, tenant="long", first=100 * number)
        bench.submit(f"short{number}", 5, 1, tenant="short")
        bench.submit(f"cached{number}", 50, 1, tenant="cached", first=1000)
    bench.run()
    order = bench.ended[1:]
    assert order.index("short2") < order.index("long1")
    assert order.index("cached2") < order.index("long2")


def test_of_two_the_less_urgent_gives_way_though_it_is_older() -> None:
    bench = Bench(num_blocks=8)
    low = bench.submit("low", 12, 20, priority=1)
    bench.step()
    bench.submit("urgent", 12, 20, first=100)
    bench.step()
    assert bench.running == ["low", "urgent"]
    while len(bench.running) == 2:
        plan = bench.step()
    assert bench.running == ["urgent"]
    assert len(plan.row_slots) == 1  # the victim has no row in the plan that retires it
    bench.run()
    assert bench.ended == ["urgent", "low"]
    assert_complete(low)


def test_a_victim_never_has_a_row_in_the_plan_that_retires_it() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=6)
    for number in range(6):
        bench.submit(f"r{number}", 4, 28, first=50 * number, priority=number % 3)
    while bench.core.num_requests:
        plan = bench.step()
        entered = {entering.slot for entering in plan.entering}
        assert not (set(plan.retired) - entered) & set(plan.row_slots)
    assert bench.core.counters.preemptions > 0


def test_waiting_makes_up_for_urgency() -> None:
    now = 0.0
    core = SchedulerCore(100, clock=lambda: now)
    core.connect(NAME, CAPACITY)
    core.submit(submit("low", priority=1))
    now = 31.0
    core.submit(submit("plain"))
    assert core.waiting.first.request_id == "low"
    now = 59.0
    core.submit(submit("urgent", priority=-2))
    assert core.waiting.first.request_id == "urgent"

"""How prompts are cut so that streams keep their pace, by a clock that the tests turn."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core import SchedulerCore
from services.scheduler.pace import GROWTH, MAX_AGE, Pace
from services.scheduler.sequence import Sequence
from shared.messages import NEWEST, Announce, Plan
from shared.simulation import Simulation
from shared.types import int32s
from tests.services.scheduler.core_bench import NAME, assert_complete, next_plan, open_all, submit
from tests.services.scheduler.strict_executor import StrictExecutor

BUDGET = 512
SMALLEST = 16


def plan_of(step: int, decodes: int, tokens: int, lease: int = 0) -> Plan:
    rows = decodes + (tokens > 0)
    counts = [1] * decodes + [tokens] * (tokens > 0)
    return Plan(
        step=step,
        retired=int32s(),
        entering=[],
        block_slots=int32s(),
        block_counts=int32s(),
        block_ids=int32s(),
        row_slots=int32s(range(rows)),
        row_starts=int32s([NEWEST] * decodes + [0] * (tokens > 0)),
        row_tokens=int32s(counts),
        lease=lease,
    )


@dataclass
class Device:
    """Runs plans one after another, `ahead` of them queued, and tells a pace of them."""

    pace: Pace
    costs: Simulation
    ahead: int = 0
    step: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.queue: deque[tuple[int, float]] = deque()

    def run(self, decodes: int, tokens: int, *, hiccup: float = 0.0) -> float:
        """Send an iteration; returns what it takes."""
        self.step += 1
        seconds = self.costs.seconds(tokens, decodes) + hiccup
        self.pace.sent(plan_of(self.step, decodes, tokens), self.now)
        self.queue.append((self.step, seconds))
        if len(self.queue) > self.ahead:
            step, spent = self.queue.popleft()
            self.now += spent
            self.pace.heard(step, self.now)
        return seconds

    def read(self, decodes: int, iterations: int) -> list[int]:
        """The chunks of a prompt without an end, each as large as allowed."""
        chunks = []
        for _ in range(iterations):
            chunks.append(self.pace.allowance(BUDGET - decodes, decodes, 1))
            self.run(decodes, chunks[-1])
        return chunks


GPU = Simulation(base=0.008, prefill=0.00005, decode=0.00003)
CPU = Simulation(base=0.03, prefill=0.002, decode=0.003)


@pytest.mark.parametrize(("slowdown", "decodes"), [(2.0, 0), (math.inf, 8)])
def test_prompts_get_the_whole_budget_if_nobody_is_held_up_or_nobody_minds(
    slowdown: float, decodes: int
) -> None:
    device = Device(Pace(slowdown, BUDGET), CPU)
    assert device.read(decodes, 3) == [BUDGET - decodes] * 3


def test_what_is_not_known_is_measured_first() -> None:
    device = Device(Pace(2.0, BUDGET), GPU)
    assert device.read(8, 3) == [0, SMALLEST, GROWTH * SMALLEST]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("decodes", [1, 16, 32])
@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
def test_chunks_take_the_time_that_they_may(costs: Simulation, decodes: int, ahead: int) -> None:
    device = Device(Pace(2.0, BUDGET), costs, ahead)
    chunks = device.read(decodes, MAX_AGE)
    alone = costs.seconds(0, decodes)
    times = [costs.seconds(chunk, decodes) for chunk in chunks]
    largest = max(SMALLEST * costs.prefill, alone)
    assert max(times) <= 1.001 * (alone + largest)
    wanted = min(int(alone / costs.prefill), BUDGET - decodes)
    assert chunks[-1] == pytest.approx(max(wanted, SMALLEST), abs=1)


def test_the_first_that_is_stopped_is_the_growth_not_the_reading() -> None:
    """However cheap tokens seem, nothing is believed far beyond what was measured."""
    device = Device(Pace(2.0, 1 << 16), Simulation(base=0.01))
    chunks = [chunk for chunk in device.read(8, MAX_AGE) if chunk]
    assert all(after <= GROWTH * before for before, after in pairwise(chunks))
    assert chunks[-1] == BUDGET - 8


def test_chunks_shrink_as_their_cost_rises() -> None:
    """Attention over what was read makes each token dearer than the one before."""
    device = Device(Pace(2.0, BUDGET), CPU)
    read, worst = 0, 0.0
    while read < 4000:
        device.costs = Simulation(base=0.03, decode=0.003, prefill=0.001 * (1 + read / 1000))
        chunk = device.pace.allowance(BUDGET - 16, 16, 1)
        worst = max(worst, device.run(16, chunk))
        read += chunk
    assert worst < 2.3 * device.costs.seconds(0, 16)


def test_a_hiccup_is_no_pace() -> None:
    device = Device(Pace(2.0, BUDGET), CPU)
    for _ in range(5):
        device.run(16, 0)
    before = device.read(16, 10)[-1]
    device.run(16, 0, hiccup=5.0)
    assert device.pace.allowance(BUDGET, 16, 1) == before


def test_prompts_are_read_however_much_an_iteration_with_one_costs() -> None:
    """As if such iterations had a cost of their own, however small the chunk."""
    device = Device(Pace(2.0, BUDGET), CPU)
    device.run(16, 0)
    for _ in range(MAX_AGE - 1):
        chunk = device.pace.allowance(BUDGET, 16, 1)
        assert chunk == SMALLEST
        device.run(16, chunk, hiccup=1.0)


def test_decodes_are_measured_anew_from_time_to_time() -> None:
    """So a machine that has become faster or slower is seen even if prompts never end."""
    device = Device(Pace(2.0, BUDGET), CPU, ahead=1)
    chunks = device.read(16, 3 * (MAX_AGE + 1))
    assert [at for at, chunk in enumerate(chunks) if chunk == 0] == [
        0,
        MAX_AGE + 1,
        2 * MAX_AGE + 2,
    ]


def test_iterations_under_a_lease_are_measured() -> None:
    pace, now = Pace(2.0, BUDGET), 100.0
    pace.sent(plan_of(1, 16, 0, lease=8), now)
    for _ in range(9):
        now += 0.08
        pace.heard(1, now)
    pace.sent(plan_of(2, 16, 20), now - 0.01)  # while the lease's last was computed
    pace.heard(2, now + 0.12)  # 20 tokens in 40 ms: 40 in what decodes take
    assert pace.allowance(BUDGET, 16, 1) in (39, 40)


@pytest.mark.parametrize(("unread", "times"), [(1, 1), (16, 1), (32, 2), (160, 10)])
def test_many_that_wait_count_for_more_than_few_that_run(unread: int, times: int) -> None:
    device = Device(Pace(2.0, BUDGET), CPU)
    device.run(16, 0)
    for _ in range(16):
        chunk = device.pace.allowance(BUDGET - 16, 16, unread)
        device.run(16, chunk)
    assert chunk in (39 * times - 1, 39 * times)


def test_time_without_plans_is_no_time_of_theirs() -> None:
    device = Device(Pace(2.0, BUDGET), CPU)
    for _ in range(8):
        device.run(16, 0)
        device.now += 60
    assert device.read(16, 12)[-1] in (38, 39)


@given(
    base=st.floats(0.001, 0.1),
    prefill=st.just(0.0) | st.floats(1e-6, 0.01),
    decode=st.floats(0, 0.01),
    slowdown=st.floats(1, 4),
    ahead=st.integers(0, 2),
    rows=st.lists(st.integers(0, 64), min_size=1, max_size=80),
)
def test_whatever_comes_no_chunk_holds_the_streams_up(
    base: float, prefill: float, decode: float, slowdown: float, ahead: int, rows: list[int]
) -> None:
    """By more than it may, or than the smallest does."""
    costs = Simulation(base=base, prefill=prefill, decode=decode)
    device = Device(Pace(slowdown, BUDGET), costs, ahead)
    alike = 0.25 * decode * max(rows)  # so far apart are those that are taken for alike
    for decodes in rows:
        chunk = device.pace.allowance(BUDGET, decodes, 1)
        assert 0 <= chunk <= BUDGET
        device.run(decodes, chunk)
        if decodes:
            allowed = (slowdown - 1) * (costs.seconds(0, decodes) + alike) + alike
            assert chunk * prefill <= max(GROWTH * allowed, SMALLEST * prefill) + 1e-6


@given(st.lists(st.integers(1, 64), min_size=60, max_size=60))
def test_prompts_are_always_read_on(rows: list[int]) -> None:
    """Each kind of number is measured once and then rarely; all other iterations read."""
    device = Device(Pace(2.0, BUDGET), CPU, ahead=1)
    idle = 0
    for decodes in rows:
        chunk = device.read(decodes, 1)[0]
        assert chunk == 0 or chunk >= SMALLEST
        idle += chunk == 0
    assert idle <= 20


def test_streams_beside_a_long_prompt_in_the_scheduler() -> None:
    """Plans get there: the prompt is cut so that iterations take about twice as long, no more."""
    capacity = Announce("model", 1000, 16, 8, BUDGET, 8192, 50021)
    executor, clock = StrictExecutor(capacity, ahead=True), [0.0]
    core = SchedulerCore(8, lambda: clock[0], max_decode_slowdown=2.0)
    core.connect(NAME, capacity)
    sequences = [core.submit(submit(f"s{n}", 4, 400, seed=n)) for n in range(4)]
    times: list[tuple[int, float]] = []

    def iterate() -> None:
        open_all(core)
        plan = next_plan(core)
        assert plan is not None
        decodes = plan.row_starts.count(NEWEST)
        tokens = sum(plan.row_tokens) - decodes
        times.append((tokens, CPU.seconds(tokens, decodes)))
        clock[0] += times[-1][1]
        core.apply(NAME, executor.execute(plan))

    for _ in range(10):
        iterate()
    sequences.append(core.submit(submit("long", 2000, 4, first=500)))
    while core.num_requests:
        iterate()
    for sequence in sequences:
        assert isinstance(sequence, Sequence)
        assert_complete(sequence)
    chunks = [seconds for tokens, seconds in times[10:] if tokens]
    assert len(chunks) > 20
    assert median(chunks) == pytest.approx(2 * CPU.seconds(0, 4), rel=0.1)
    assert max(chunks) < 2.5 * CPU.seconds(0, 4)

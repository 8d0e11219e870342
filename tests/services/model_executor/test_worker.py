"""The compute thread, with a runner that does as it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from services.model_executor.batch import PlanMisfit
from services.model_executor.results import Span, StepOutput
from services.model_executor.worker import MAX_PLANS, Done, Job, Worker
from shared.messages import Announce, Plan, StepResult
from shared.service import StartError
from shared.types import Incarnation, int32s

CAPACITY = Announce("f", 1, 1, 1, 1, 1, 1)
EPOCH = Incarnation(3)
NONE = int32s()
RESULT = StepResult(EPOCH, 1, NONE, NONE, NONE, b"")
OUTPUT = StepOutput(RESULT, {}, 0, decode_tokens=1, num_running=1, span=Span(0, 0))


def job(step: int, link: int = 0, lease: int = 0) -> Job:
    plan = Plan(step, NONE, [], NONE, NONE, NONE, NONE, NONE, NONE, lease)
    return Job(link, EPOCH, plan)


class ScriptedRunner:
    """Steps below 0 do not fit, step 0 is a fault, 13 waits for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.waits = threading.Event()
        self.seen: list[int | str] = []
        self.iterations: list[int] = []
        self.num_running = 0

    def announce(self) -> Announce:
        return CAPACITY

    def reset(self) -> None:
        self.seen.append("reset")

    def execute(self, plan: Plan, epoch: Incarnation, iteration: int, arrived: float) -> StepOutput:
        self.seen.append(plan.step)
        self.iterations.append(iteration)
        self.num_running = 1
        if plan.step == 13 and iteration == plan.lease // 2:
            self.waits.set()
            self.go.wait()
        if plan.step == 0:
            raise MemoryError
        if plan.step < 0:
            raise PlanMisfit("no")
        return OUTPUT


class Bench:
    """A worker and what it tells."""

    def __init__(self) -> None:
        self.runner = ScriptedRunner()
        self.done: asyncio.Queue[Done] = asyncio.Queue()
        self.faults: asyncio.Queue[BaseException] = asyncio.Queue()
        self.worker = Worker(lambda: self.runner, self.done.put_nowait, self.faults.put_nowait)

    async def steps(self, count: int) -> list[int]:
        async with asyncio.timeout(10):
            return [(await self.done.get()).job.plan.step for _ in range(count)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    assert await bench.worker.start() == CAPACITY
    yield bench
    bench.runner.go.set()
    bench.worker.close()
    await asyncio.to_thread(bench.worker._thread.join, 10)
    assert not bench.worker._thread.is_alive()


async def test_jobs_are_done_in_order(bench: Bench) -> None:
    for step in (1, 2, 3):
        assert bench.worker.submit(job(step))
    done = [await asyncio.wait_for(bench.done.get(), 10) for _ in range(3)]
    assert [one.job.plan.step for one in done] == [1, 2, 3]
    assert all(one.output is OUTPUT and one.misfit is None for one in done)
    assert bench.worker.num_running == 1


async def test_a_lease_is_used_up_when_nothing_newer_comes(bench: Bench) -> None:
    bench.worker.submit(job(1, lease=3))
    assert await bench.steps(4) == [1, 1, 1, 1]
    bench.worker.submit(job(2))
    assert await bench.steps(1) == [2]
    assert bench.runner.iterations == [0, 1, 2, 3, 0]


async def test_a_newer_plan_ends_a_lease_at_the_next_iteration(bench: Bench) -> None:
    bench.worker.submit(job(13, lease=10))
    await asyncio.to_thread(bench.runner.waits.wait)
    bench.worker.submit(job(14))
    bench.runner.go.set()
    assert await bench.steps(7) == [13] * 6 + [14]
    assert bench.runner.iterations == [*range(6), 0]


async def test_the_queue_is_bounded_and_the_loop_goes_on(bench: Bench) -> None:
    bench.worker.submit(job(13))
    await asyncio.to_thread(bench.runner.waits.wait)
    taken = [bench.worker.submit(job(step)) for step in range(20, 20 + MAX_PLANS + 1)]
    assert taken == [True] * MAX_PLANS + [False]
    bench.runner.go.set()
    assert await bench.steps(MAX_PLANS + 1) == [13, *range(20, 20 + MAX_PLANS)]


async def test_jobs_of_a_former_link_are_skipped_and_a_new_one_begins_empty(bench: Bench) -> None:
    bench.worker.submit(job(13))
    await asyncio.to_thread(bench.runner.waits.wait)
    bench.worker.submit(job(14))
    bench.worker.link = 1
    bench.worker.submit(job(15, link=1))
    bench.runner.go.set()
    assert await bench.steps(2) == [13, 15]
    assert bench.runner.seen == ["reset", 13, "reset", 15]


async def test_a_misfit_empties_the_batch_and_is_told(bench: Bench) -> None:
    bench.worker.submit(job(-1))
    done = await asyncio.wait_for(bench.done.get(), 10)
    assert (done.output, done.misfit) == (None, "no")
    assert bench.runner.seen == ["reset", -1, "reset"]
    bench.worker.submit(job(2))
    assert await bench.steps(1) == [2]


async def test_a_fault_is_told_and_ends_the_thread(bench: Bench) -> None:
    bench.worker.submit(job(0))
    assert isinstance(await asyncio.wait_for(bench.faults.get(), 10), MemoryError)
    await asyncio.to_thread(bench.worker._thread.join, 10)
    assert not bench.worker._thread.is_alive()


async def test_closing_ends_it_in_the_middle_of_a_full_queue(bench: Bench) -> None:
    bench.worker.submit(job(13))
    await asyncio.to_thread(bench.runner.waits.wait)
    while bench.worker.submit(job(1)):
        pass
    bench.worker.close()
    bench.runner.go.set()
    await asyncio.to_thread(bench.worker._thread.join, 10)
    assert bench.runner.seen == ["reset", 13]


async def test_what_loading_raises_is_raised_by_start() -> None:
    def load() -> ScriptedRunner:
        raise StartError("no such model")

    worker = Worker(load, lambda done: None, lambda error: None)
    with pytest.raises(StartError, match="no such model"):
        await worker.start()

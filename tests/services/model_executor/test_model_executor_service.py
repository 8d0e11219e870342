"""The service in a mesh: whom it announces itself to, whose plans it runs, who hears of tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING

import pytest

from services.model_executor import service as executor_service
from services.model_executor.service import ModelExecutorService
from shared.messages import (
    Announce,
    MetricsReply,
    MetricsRequest,
    Plan,
    Roster,
    StepResult,
    Withdraw,
)
from shared.sampling import SamplingParams
from shared.settings import Settings
from shared.types import FinishReason, Handle, RequestId, ServiceName, int32s
from tests.services.model_executor.plan_maker import PlanMaker, Running

if TYPE_CHECKING:
    from tests.conftest import Station, Stations

DETOKENIZER, EXECUTOR = ServiceName.DETOKENIZER, ServiceName.MODEL_EXECUTOR
GATEWAY, SCHEDULER = ServiceName.GATEWAY, ServiceName.SCHEDULER

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
ANSWER = 7042  # " Paris"
BYSTANDERS = count()


def question(detokenizer: str = "detokenizer.0", max_tokens: int = 3) -> Running:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=max_tokens)
    return Running(Handle(5), len(PROMPT), params, list(PROMPT), detokenizer)


async def serve(stations: Stations) -> ModelExecutorService:
    service = await stations.serve(
        ModelExecutorService, num_gpu_blocks_override=64, max_num_seqs=4, cpu_threads=1
    )
    assert isinstance(service, ModelExecutorService)
    return service


async def announced(scheduler: Station) -> Announce:
    """What the executor says, once and unasked, to a scheduler that it joins."""
    return await scheduler.next(Announce)


async def ask(scheduler: Station, maker: PlanMaker, sequence: Running) -> list[StepResult]:
    """Run a sequence to its end, plan by plan."""
    results = []
    maker.enter(sequence)
    while maker.running:
        scheduler.say(EXECUTOR, maker.plan())
        results.append(await scheduler.next(StepResult))
        maker.take_result(results[-1])
    return results


def misfit(maker: PlanMaker) -> Plan:
    none, session = int32s(), maker.limits.session
    return Plan(
        maker.step + 1, int32s([3]), [], none, none, none, none, none, none, session=session
    )


async def test_tokens_go_to_the_scheduler_and_to_the_detokenizers_concerned(
    stations: Stations,
) -> None:
    service = await serve(stations)
    scheduler = await stations.station(SCHEDULER)
    detokenizer = await stations.station(DETOKENIZER)
    gateway = await stations.station(GATEWAY)
    await stations.linked(service, scheduler, detokenizer, gateway)
    capacity = await announced(scheduler)
    assert (capacity.num_blocks, capacity.max_num_seqs) == (64, 4)
    assert capacity.fingerprint.endswith("-float32")
    one, maker = question(), PlanMaker(capacity)
    results = await ask(scheduler, maker, one)
    assert one.outputs[0] == ANSWER
    assert one.finish is FinishReason.LENGTH
    assert {result.epoch for result in results} == {scheduler.mesh.identity.incarnation}
    assert [await detokenizer.next(StepResult) for _ in results] == results
    assert not service.busy
    gateway.say(EXECUTOR, MetricsRequest(RequestId("m")))
    exposition = (await gateway.next(MetricsReply)).exposition
    assert "headrace_iterations_total 3.0" in exposition
    assert "headrace_iteration_seconds_count 3.0" in exposition
    assert 'headrace_iteration_tokens_total{kind="prefill"} 5.0' in exposition
    assert 'headrace_iteration_tokens_total{kind="decode"} 2.0' in exposition
    assert "headrace_executor_busy_seconds_total" in exposition


async def test_after_a_misfit_both_start_over(stations: Stations) -> None:
    service = await serve(stations)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, scheduler)
    maker = PlanMaker(await announced(scheduler))
    maker.enter(question())
    scheduler.say(EXECUTOR, maker.plan())
    await scheduler.next(StepResult)
    assert service.busy
    # Those behind the first were sent before its consequence was known: one announcement for all.
    scheduler.say(EXECUTOR, *[misfit(maker)] * 4)
    maker = PlanMaker(await scheduler.next(Announce))
    one = question()
    await ask(scheduler, maker, one)
    assert one.outputs[0] == ANSWER
    for _ in range(3):  # each is announced, however little came between them
        scheduler.say(EXECUTOR, misfit(maker))
        maker = PlanMaker(await scheduler.next(Announce))


async def test_a_scheduler_that_comes_back_finds_an_empty_batch(stations: Stations) -> None:
    service = await serve(stations)
    async with leaving(stations, service) as scheduler:
        maker = PlanMaker(await announced(scheduler))
        maker.enter(question())
        scheduler.say(EXECUTOR, maker.plan())
        await scheduler.next(StepResult)
        had_work = service.busy
    async with leaving(stations, service) as scheduler:
        maker = PlanMaker(await announced(scheduler))
        assert had_work and not service.busy
        one = question()
        await ask(scheduler, maker, one)
        assert one.outputs[0] == ANSWER


async def test_another_scheduler_is_served_only_after_the_first(stations: Stations) -> None:
    service = await serve(stations)
    async with leaving(stations, service) as first:
        maker = PlanMaker(await announced(first))
        await ask(first, maker, question())
        second = await stations.station(SCHEDULER, index=1)
        await stations.linked(service, second)
        second.say(EXECUTOR, Roster([]), misfit(maker))
        await second.next(Withdraw)  # it must not count on us
        one = question()
        await ask(first, maker, one)
        assert one.outputs[0] == ANSWER
    one, maker = question(), PlanMaker(await second.next(Announce))
    await ask(second, maker, one)
    assert one.outputs[0] == ANSWER


async def test_a_scheduler_that_forgot_us_hears_of_us(stations: Stations) -> None:
    """It had us hold what it has forgotten."""
    service = await serve(stations)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, scheduler)
    capacity = await announced(scheduler)
    maker = PlanMaker(capacity)
    maker.enter(question())
    scheduler.say(EXECUTOR, Roster([]))  # maybe it just has not heard of us yet
    assert await scheduler.next(Announce) == capacity
    scheduler.say(EXECUTOR, Roster([service.mesh.identity.name]), maker.plan())
    await scheduler.next(StepResult)
    scheduler.say(EXECUTOR, Roster([]))
    again = await scheduler.next(Announce)
    assert again.session > capacity.session
    assert not service.busy
    one = question()
    scheduler.say(EXECUTOR, maker.plan())  # of the former session: not run
    await ask(scheduler, PlanMaker(again), one)
    assert one.outputs[0] == ANSWER


async def test_of_two_executors_one_moves_to_a_scheduler_that_has_none(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_service, "MOVE_SECONDS", 0.05)
    service = await serve(stations)
    ours, before, behind = service.mesh.identity.name, "an executor", "the last executor"
    first = await stations.station(SCHEDULER)
    await stations.linked(service, first)
    maker = PlanMaker(await announced(first))
    maker.enter(question())
    first.say(EXECUTOR, Roster([ours, behind]), maker.plan())
    await first.next(StepResult)
    second = await stations.station(SCHEDULER, index=1)
    await stations.linked(service, second)
    second.say(EXECUTOR, Roster([]))  # the other one is to move
    first.say(EXECUTOR, Roster([before, ours]))
    await first.next(Withdraw)
    one, maker = question(), PlanMaker(await second.next(Announce))
    assert not service.busy
    await ask(second, maker, one)
    assert one.outputs[0] == ANSWER


async def test_no_two_lives_have_the_same_session(stations: Stations) -> None:
    """Else a plan for one of them could be run by the other."""
    scheduler = await stations.station(SCHEDULER)
    sessions = set()
    for index in range(2):
        service = await stations.serve(
            ModelExecutorService, device="simulated", index=index, num_gpu_blocks_override=64
        )
        await stations.linked(service, scheduler)
        sessions.add((await scheduler.next(Announce)).session)
    assert len(sessions) == 2


async def test_tokens_for_a_detokenizer_that_is_not_linked_yet_reach_it(
    stations: Stations,
) -> None:
    service = await serve(stations)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, scheduler)
    results = await ask(scheduler, PlanMaker(await announced(scheduler)), question())
    detokenizer = await stations.station(DETOKENIZER)
    assert [await detokenizer.next(StepResult) for _ in results] == results


@asynccontextmanager
async def leaving(stations: Stations, service: ModelExecutorService) -> AsyncIterator[Station]:
    """A scheduler that leaves before the test ends."""
    kind = type(await stations.station(DETOKENIZER, index=next(BYSTANDERS)))
    async with kind(SCHEDULER, Settings(mesh=service.settings.mesh)).running() as scheduler:
        await stations.linked(service, scheduler)
        yield scheduler

"""Members that speak in another's name: others begin anew with whom they took it for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.gateway.admission import MAX_SCHEDULERS, Admission
from services.model_executor.service import ModelExecutorService
from services.scheduler.executors import MAX_KNOWN
from services.scheduler.service import SchedulerService
from shared.codec import Identity, encode
from shared.messages import Announce, Credit, Plan, Roster
from shared.types import Incarnation, ServiceName, int32s
from tests.conftest import until
from tests.shared.mesh_member import raw_push

if TYPE_CHECKING:
    from tests.conftest import Stations

SCHEDULER, EXECUTOR = ServiceName.SCHEDULER, ServiceName.MODEL_EXECUTOR
CAPACITY = Announce("f00d", 16, 4, 4, 32, 64, 1000, session=7)
NONE = int32s()


async def test_an_executor_is_asked_again_after_another_used_its_name(stations: Stations) -> None:
    scheduler = await stations.serve(SchedulerService)
    executor = await stations.station(EXECUTOR)
    await stations.linked(executor, scheduler)
    assert (await executor.next(Roster)).executors == []
    executor.say(SCHEDULER, CAPACITY)
    fleet = scheduler._core.fleet
    assert (await executor.next(Roster)).executors == [executor.name]
    impostor = Identity(EXECUTOR, executor.name, Incarnation(1))
    with raw_push(Path(stations.directory), scheduler.mesh.identity.name) as push:
        push.send(encode(replace(CAPACITY, fingerprint="another"), impostor))
        assert (await executor.next(Roster)).executors == []
    executor.say(SCHEDULER, replace(CAPACITY, session=8))
    await until(lambda: [engine.capacity.session for engine in fleet.engines] == [8])


async def test_plans_for_another_of_its_name_are_answered(stations: Stations) -> None:
    flags = {"device": "simulated", "num_gpu_blocks_override": 64}
    service = await stations.serve(ModelExecutorService, **flags)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, scheduler)
    scheduler.say(EXECUTOR, Roster([]))
    capacity = await scheduler.next(Announce)
    for session in (0, 7, capacity.session + 1, 2**62):
        plan = Plan(1, NONE, [], NONE, NONE, NONE, NONE, NONE, NONE, session=session)
        scheduler.say(EXECUTOR, plan)
        assert await scheduler.next(Announce) == capacity


async def test_executors_that_are_not_there_are_not_remembered_for_ever(
    stations: Stations,
) -> None:
    scheduler = await stations.serve(SchedulerService)
    executor = await stations.station(EXECUTOR)
    await stations.linked(executor, scheduler)
    executor.say(SCHEDULER, CAPACITY)
    with raw_push(Path(stations.directory), scheduler.mesh.identity.name) as push:
        for number in range(1000):
            push.send(encode(CAPACITY, Identity(EXECUTOR, f"no.{number}", Incarnation(1))))
        await until(lambda: "no.999" in scheduler._executors._known)  # else the rest is not sent
    assert len(scheduler._executors._known) <= MAX_KNOWN
    assert list(scheduler._core.fleet.names) == [executor.name]


def test_credit_of_schedulers_that_are_not_there_is_not_kept_for_ever() -> None:
    admission = Admission()
    for number in range(5000):
        admission.credit("scheduler.0", Credit(4, 4, 0, 0))
        admission.credit(f"no.{number}", Credit(4, 4, 0, 0))
        assert admission.capacity(["scheduler.0"]) == 8
    assert len(admission._credits) <= MAX_SCHEDULERS

"""Who may say what: any other message is dropped before its service sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog

from services.detokenizer.service import DetokenizerService
from services.scheduler.service import SchedulerService
from shared import rarely
from shared.directions import DIRECTIONS, expected
from shared.messages import REGISTRY, Announce, Decoded, MetricsReply, MetricsRequest
from shared.rarely import Rarely
from shared.service import Service
from shared.types import RequestId, ServiceName
from tests.conftest import until
from tests.shared.mesh_member import raw_push

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Station, Stations
    from tests.shared.mesh_member import IpcMembers

GATEWAY, SCHEDULER = ServiceName.GATEWAY, ServiceName.SCHEDULER
EXECUTOR, DETOKENIZER = ServiceName.MODEL_EXECUTOR, ServiceName.DETOKENIZER


def test_every_message_has_its_ways() -> None:
    assert DIRECTIONS.keys() == set(REGISTRY.values())
    assert all(DIRECTIONS.values())


def dropped(service: Service) -> float:
    value = service.mesh.registry.get_sample_value("headrace_mesh_misdirected_total")
    assert value is not None
    return value


async def met(stations: Stations, service: Service, kind: ServiceName) -> Station:
    station = await stations.station(kind)
    await stations.linked(station, service)
    return station


async def test_what_goes_another_way_is_dropped(stations: Stations) -> None:
    detokenizer = await stations.serve(DetokenizerService)
    gateway = await met(stations, detokenizer, GATEWAY)
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            gateway.say(DETOKENIZER, Decoded(RequestId("a"), ""))
        gateway.say(DETOKENIZER, MetricsRequest(RequestId("m")))
        await gateway.next(MetricsReply)
    assert dropped(detokenizer) == 100
    [line] = [log for log in logs if log["event"] == "misdirected message dropped"]
    assert (line["message"], line["sender"], line["times"]) == ("Decoded", "gateway", 1)


async def test_only_an_executor_can_announce_itself(stations: Stations) -> None:
    scheduler = await stations.serve(SchedulerService)
    capacity = Announce("f", 16, 4, 4, 32, 64, 1000)
    assert not expected(capacity, GATEWAY, SCHEDULER)
    gateway = await met(stations, scheduler, GATEWAY)
    gateway.say(SCHEDULER, capacity)
    await until(lambda: dropped(scheduler) == 1)
    assert not scheduler._core.fleet.engines
    executor = await met(stations, scheduler, EXECUTOR)
    executor.say(SCHEDULER, capacity)
    await until(lambda: bool(scheduler._core.fleet.engines))


async def test_a_flood_of_garbage_is_one_line(ipc_members: IpcMembers, run_directory: Path) -> None:
    tokenizer = ipc_members(ServiceName.TOKENIZER)
    with structlog.testing.capture_logs() as logs:
        async with tokenizer.present():
            with raw_push(run_directory, tokenizer.name) as push:
                for number in range(1000):
                    push.send(b"garbage %d" % number)
                await until(lambda: tokenizer.metric("bad_frames") == 1000)
    assert len([log for log in logs if log["event"] == "bad frame dropped"]) == 1


def test_a_line_says_how_many_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(rarely.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    log = Rarely("test")
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            log.warning("noise", "loud", what="a")
        log.warning("noise", "soft", what="b")
        now += rarely.QUIET_SECONDS
        log.warning("noise", "loud", what="c")
    told = [(line["what"], line["times"]) for line in logs]
    assert told == [("a", 1), ("b", 1), ("c", 5)]

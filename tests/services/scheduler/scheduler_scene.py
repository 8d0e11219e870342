"""The real scheduler service in a real mesh, among scripted peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from services.scheduler.service import SchedulerService
from shared.messages import (
    Admitted,
    Announce,
    Credit,
    Failed,
    Message,
    Plan,
    Recall,
    Recalled,
    Roster,
    StepResult,
    Submit,
)
from shared.types import ServiceName
from tests.services.scheduler.core_bench import CAPACITY, submit
from tests.services.scheduler.strict_executor import StrictExecutor

if TYPE_CHECKING:
    from tests.conftest import Station, Stations

GATEWAY, TOKENIZER, DETOKENIZER = (
    ServiceName.GATEWAY,
    ServiceName.TOKENIZER,
    ServiceName.DETOKENIZER,
)
SCHEDULER, EXECUTOR = ServiceName.SCHEDULER, ServiceName.MODEL_EXECUTOR

Kind = TypeVar("Kind", bound=Message)


async def heard(station: Station, kind: type[Kind]) -> Kind:
    """The next message of this kind; what comes unasked passes by, anything else is wrong."""
    while True:
        message: Message = await station.next(Message)  # type: ignore[arg-type]
        if isinstance(message, kind):
            return message
        assert isinstance(message, Credit | Admitted | Roster | Recall), message


class Scene:
    """A scheduler, and a station in the place of each of its peers."""

    def __init__(self, stations: Stations, scheduler: SchedulerService) -> None:
        self.stations = stations
        self.scheduler = scheduler
        self.executor = StrictExecutor(CAPACITY)
        self.at: dict[ServiceName, Station] = {}

    @classmethod
    async def set(cls, stations: Stations, **settings: Any) -> Scene:
        """All peers are there, and the executor has announced itself."""
        settings = {"run_ahead": 0, "max_lease": 0, "max_decode_slowdown": inf, **settings}
        scene = cls(stations, await stations.serve(SchedulerService, **settings))
        for service in (GATEWAY, TOKENIZER, DETOKENIZER, EXECUTOR):
            await scene.place(service)
        await scene.announce()
        return scene

    async def place(self, service: ServiceName) -> None:
        """A station of this service, linked both ways."""
        self.at[service] = station = await self.stations.station(service)
        await self.stations.linked(station, self.scheduler)

    async def lose(self, service: ServiceName) -> None:
        """The station leaves; returns when the scheduler knows."""
        gone = self.at.pop(service)
        await self.stations.leave(gone)
        while gone.name in self.scheduler.mesh.peers(service):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def announce(self, capacity: Announce = CAPACITY) -> Credit:
        """The executor presents itself, with nothing in its slots."""
        self.executor = StrictExecutor(capacity)
        self.say(EXECUTOR, capacity)
        return await self.credit(max_num_seqs=capacity.max_num_seqs)

    def say(self, who: ServiceName, *messages: Message) -> None:
        self.at[who].say(SCHEDULER, *messages)

    async def hear(self, who: ServiceName, kind: type[Kind]) -> Kind:
        """The next message of this kind; what comes unasked passes by, anything else is wrong."""
        return await heard(self.at[who], kind)

    async def recalled(self, *journals: Submit) -> None:
        """The executor was lost: the detokenizer submits what it has."""
        recall = await self.hear(DETOKENIZER, Recall)
        self.say(DETOKENIZER, *journals, Recalled(recall.number))

    async def caught_up(self) -> None:
        """The scheduler has taken in all that the detokenizer said, and has told it of all that."""
        self.say(DETOKENIZER, replace(submit("far too long", 5, 10_000), output_tokens=0))
        assert (await self.hear(DETOKENIZER, Failed)).request_id == "far too long"

    async def credit(self, **wanted: int) -> Credit:
        """The first credit that says so."""
        while True:
            credit = await self.hear(GATEWAY, Credit)
            if all(getattr(credit, name) == value for name, value in wanted.items()):
                return credit

    def compute(self, plan: Plan) -> StepResult:
        epoch = self.scheduler.mesh.identity.incarnation
        return replace(self.executor.execute(plan), epoch=epoch)

    async def iterate(self) -> StepResult:
        """Run the next plan."""
        result = self.compute(await self.hear(EXECUTOR, Plan))
        self.say(EXECUTOR, result)
        return result

    async def finish(self, requests: int) -> None:
        """Run plans until so many requests have finished."""
        while requests > 0:
            requests -= sum(finish > 0 for finish in (await self.iterate()).finishes)

    @asynccontextmanager
    async def computing(self) -> AsyncIterator[None]:
        """Run all plans meanwhile."""

        async def run() -> None:
            while True:
                await self.iterate()

        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def metric(self, name: str, **labels: str) -> float:
        value = self.scheduler.registry.get_sample_value(f"headrace_{name}", labels)
        assert value is not None, name
        return value

"""A real service under attack: its inbox, and real members of its mesh around it.

It lives on a loop in a thread of its own, so that an example of hypothesis can go on with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self, TypeVar

import uvloop
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.frames import Forge, Pools
from shared.messages import Message
from shared.service import Service
from shared.types import ServiceName
from tests.conftest import PATIENCE, Station, Stations, until

Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=Message)

AT_ONCE = 4  # frames
FRAMES_WAIT = 0.002  # seconds; for threads that may have something to do yet


async def hear(station: Station, kind: type[Kind]) -> Kind:
    """The next of this kind; others pass by."""
    while True:
        message = await station._heard.get()
        if isinstance(message, kind):
            return message


class Subject:
    """One kind of service; a new life begins whenever it has died."""

    kind: ClassVar[type[Service]]
    peers: ClassVar[Sequence[ServiceName]]
    flags: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Path) -> None:
        self._model = model
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._begin())
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def attack(self, seeds: Sequence[int]) -> None:
        """A frame for each seed, said by somebody with keys; fails if the service ends."""
        self._run(self.populate())
        for start in range(0, len(seeds), AT_ONCE):  # those that follow know what became of these
            forges = [self._forge(seed) for seed in seeds[start : start + AT_ONCE]]
            self._run(self._feed([forge.frame() for forge in forges]))

    def goes_on(self, examples: int = 60) -> None:
        """Attack it many times; then it must serve new members as if nothing had been."""

        @settings(max_examples=examples)
        @given(st.lists(st.integers(0, 2**32), min_size=1, max_size=40))
        def attacked(seeds: list[int]) -> None:
            self.attack(seeds)

        attacked()
        self._run(self._check())

    # --- what differs between services

    def pools(self) -> Pools:
        """Values that mean something to it right now, by the names of fields."""
        raise NotImplementedError

    async def ask(self, at: dict[ServiceName, Station]) -> None:
        """Have fresh members of the mesh served, and compare what they get with what is right."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Before it runs."""

    async def set_up(self) -> None:
        """When all members are linked."""

    async def populate(self) -> None:
        """Give it something that an attack could spoil."""

    def idle(self) -> bool:
        """Whether its threads have dealt with all that was sent."""
        return True

    # ---

    def _run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    async def _begin(self) -> None:
        self._directory = TemporaryDirectory(prefix="headrace-")
        self._stations = Stations(self._model, self._directory.name)
        self.service = self._stations.service(self.kind, **self.flags)
        self.prepare()
        setattr(self.service, "_watch_signals", lambda: None)  # noqa: B010 - a main thread's to do
        self._task = asyncio.create_task(self.service.run())
        self.at = await self._place()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.set(zmq.LINGER, 0)
        self._push.connect(f"ipc://{self._directory.name}/{self.service.mesh.identity.name}.sock")
        await self.set_up()

    async def _end(self) -> None:
        self._push.close()
        self._context.term()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._stations.close()
        self._directory.cleanup()

    async def _place(self) -> dict[ServiceName, Station]:
        """A member of each kind, linked to the service both ways."""
        at = {peer: await self._stations.station(peer) for peer in self.peers}
        for station in at.values():
            await self._stations.linked(station, self.service)
        return at

    def _forge(self, seed: int) -> Forge:
        senders = [station.mesh.identity for station in self.at.values()]
        service = self.service.mesh.identity.service
        return Forge(Random(seed), service, senders, self.pools())

    async def _feed(self, frames: Sequence[bytes]) -> None:
        expected = self._received() + len(frames)
        for frame in frames:
            await asyncio.to_thread(self._push.send, frame)
        try:
            await until(lambda: self._task.done() or self._received() >= expected)
            await until(lambda: self._task.done() or self.idle())
            await asyncio.sleep(FRAMES_WAIT)
        finally:
            if self._task.done():
                result = (await asyncio.gather(self._task, return_exceptions=True))[0]
                await self._end()
                await self._begin()
                raise AssertionError(f"the service ended with {result!r} by {frames!r}")

    def _received(self) -> float:
        return (
            self.service.mesh.registry.get_sample_value("headrace_mesh_frames_received_total")
            or 0.0
        )

    async def _check(self) -> None:
        for station in self.at.values():
            await self._stations.leave(station)
        for peer in self.peers:
            if peer in self.service.talks_to:
                await until(lambda: not self.service.mesh.present(peer))  # noqa: B023
        self.at = await self._place()
        async with asyncio.timeout(PATIENCE):
            await self.ask(self.at)

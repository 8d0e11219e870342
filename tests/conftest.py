"""Fixtures for every test: the real default model, and instances of the mesh to talk to a service.

The model is prepared once and cached outside the tree.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import hypothesis
import pytest

import services.model_executor  # noqa: F401 - before torch: it says how OpenMP waits
from services.launcher.models import prepare_model
from shared.codec import Identity
from shared.mesh import Mesh, MeshAddress
from shared.messages import Message
from shared.service import Service
from shared.settings import Settings
from shared.types import ServiceName

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is no failure
hypothesis.settings.load_profile("any machine")

if threading.current_thread() is threading.main_thread():
    # Started in the background by a shell, all of this would ignore Ctrl-C, which is tested too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

PATIENCE = 20.0  # seconds until a test that waits in vain is told so

Heard = TypeVar("Heard", bound=Message)
Running = TypeVar("Running", bound=Service)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The prepared directory of SmolLM2-135M-Instruct."""
    return prepare_model("", print)


class Station:
    """A bare instance of any service: it hears everything, and says what a test wants said."""

    def __init__(self, service: ServiceName, settings: Settings) -> None:
        self.mesh = Mesh(service, MeshAddress.from_settings(service, settings), ServiceName)
        self._heard: asyncio.Queue[Message] = asyncio.Queue()

    @property
    def name(self) -> str:
        return self.mesh.identity.name

    async def next(self, kind: type[Heard]) -> Heard:
        """The next message, which must be of this kind."""
        async with asyncio.timeout(PATIENCE):
            message = await self._heard.get()
        assert isinstance(message, kind), message
        return message

    def say(self, service: ServiceName, *messages: Message) -> None:
        """Send to the first instance of a service."""
        for message in messages:
            assert self.mesh.send(service, self.mesh.peers(service)[0], message)

    def _on_message(self, message: Message, sender: Identity) -> None:
        self._heard.put_nowait(message)

    def _on_change(self, service: ServiceName, name: str) -> None:
        """Joins and losses show in `mesh.peers`."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Station]:
        self.mesh.open(self._on_message, self._on_change, self._on_change)
        discovery = asyncio.create_task(self.mesh.discover())
        try:
            yield self
        finally:
            discovery.cancel()
            await asyncio.gather(discovery, return_exceptions=True)
            self.mesh.close()


class Stations:
    """One service under test in this process, and the stations around it, over a real mesh."""

    def __init__(self, model: Path, directory: str) -> None:
        self._model = model
        self.directory = directory
        self._stack = AsyncExitStack()
        self._stacks: dict[Station, AsyncExitStack] = {}

    def _settings(self, index: int = 0, **settings: Any) -> Settings:
        return Settings(mesh=f"ipc:{self.directory}", index=index, **settings)

    async def station(self, service: ServiceName, index: int = 0) -> Station:
        station = Station(service, self._settings(index))
        own = self._stacks[station] = await self._stack.enter_async_context(AsyncExitStack())
        return await own.enter_async_context(station.running())

    async def leave(self, station: Station) -> None:
        """Take a station out of the mesh before the test ends; another may take its place."""
        await self._stacks.pop(station).aclose()

    def service(self, kind: type[Service], **settings: Any) -> Service:
        """A service that does not run yet."""
        own = self._settings(**{"model": str(self._model), **settings})
        mesh = Mesh(kind.service, MeshAddress.from_settings(kind.service, own), kind.talks_to)
        return kind(own, mesh)

    async def serve(self, kind: type[Running], **settings: Any) -> Running:
        """Run a service until the test ends."""
        service = self.service(kind, **settings)
        assert isinstance(service, kind)
        task = asyncio.create_task(service.run())
        self._stack.push_async_callback(_end, task)
        return service

    async def linked(self, *parties: Service | Station) -> None:
        """Wait until each of these sees all others that it talks to."""
        for one in parties:
            for other in parties:
                identity = other.mesh.identity
                kind = identity.service
                if one is not other and (isinstance(one, Station) or kind in one.talks_to):
                    await until(lambda: identity.name in one.mesh.peers(kind))  # noqa: B023

    async def close(self) -> None:
        await self._stack.aclose()


async def _end(task: asyncio.Task[int]) -> None:
    task.cancel()
    result = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result[0], asyncio.CancelledError), result  # else it had ended by a fault


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something in this process has become true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


@pytest.fixture
async def stations(model_dir: Path) -> AsyncIterator[Stations]:
    with TemporaryDirectory(prefix="headrace-") as directory:  # tmp_path can be too long for ipc
        stations = Stations(model_dir, directory)
        try:
            yield stations
        finally:
            await stations.close()

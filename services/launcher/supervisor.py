"""Watching the mesh's processes on one machine: start, restart, drain, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from services.launcher.instance import Backoff, Inheritance, Instance
from shared.service import LIFELINE_VARIABLE
from shared.settings import Settings
from shared.types import ServiceName

STOP_SECONDS = 5.0  # for a service that has nothing left to do; then it is killed


class StartFailed(Exception):
    """An instance ended before the mesh was ready."""


def instances_of(settings: Settings, inheritance: Inheritance) -> list[Instance]:
    """All instances that the settings ask for."""
    counts = {
        ServiceName.GATEWAY: settings.gateways,
        ServiceName.TOKENIZER: settings.tokenizers,
        ServiceName.SCHEDULER: settings.schedulers,
        ServiceName.MODEL_EXECUTOR: settings.executors,
        ServiceName.DETOKENIZER: settings.detokenizers,
    }
    return [
        Instance(service, index, inheritance)
        for service, count in counts.items()
        for index in range(count)
    ]


class Supervisor:
    """Runs instances until a signal comes.

    `wait_ready` returns when the mesh answers; `stopping` is called before it is drained.
    """

    def __init__(
        self,
        instances: list[Instance],
        run_directory: Path,
        drain_timeout: float,
        wait_ready: Callable[[], Awaitable[None]],
        stopping: Callable[[], None],
    ) -> None:
        self._run_directory = run_directory
        self._drain_timeout = drain_timeout
        self._wait_ready = wait_ready
        self._stopping = stopping
        self._ready = False
        self._signalled = asyncio.Event()
        self._signalled_again = asyncio.Event()
        self._log = structlog.get_logger("launcher")
        self._keepers = {
            instance: asyncio.create_task(self._keep(instance)) for instance in instances
        }

    async def run(self) -> None:
        """Returns after a drain; raises StartFailed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        owner = os.environ.get(LIFELINE_VARIABLE)  # of a program that started us for itself
        if owner is not None:
            loop.add_reader(int(owner), self._on_orphaned)
        start = asyncio.create_task(self._start())
        end = asyncio.create_task(self._signalled.wait())
        pending: set[asyncio.Task[Any]] = {start, end, *self._keepers.values()}
        try:
            while not end.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what a keeper or the start raised
        finally:
            start.cancel()
            end.cancel()
            await self._stop()
            await asyncio.gather(start, end, *self._keepers.values(), return_exceptions=True)

    async def _start(self) -> None:
        await self._wait_ready()
        self._ready = True

    async def _keep(self, instance: Instance) -> None:
        """One life after the other, until it is told to stop."""
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        while not instance.stopping.is_set():
            born = loop.time()
            code = await instance.live()
            # A process that was killed leaves its inbox in the registry.
            name = f"{instance.service}.{instance.index}.sock"
            (self._run_directory / name).unlink(missing_ok=True)
            if instance.stopping.is_set():
                return
            if not self._ready:
                raise StartFailed(f"{instance} ended with code {code} before the mesh was ready")
            pause = backoff.after(loop.time() - born)
            event = "service died" if code else "service left"
            self._log.warning(event, instance=str(instance), code=code, restart_in=pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(instance.stopping.wait(), pause)

    async def _stop(self) -> None:
        """Gateways first: while they drain, the others still work for them."""
        self._stopping()
        gateways = [i for i in self._keepers if i.service is ServiceName.GATEWAY]
        if self._ready:
            await self._end(gateways, self._drain_timeout + STOP_SECONDS)
        await self._end(self._keepers, STOP_SECONDS)
        for instance in self._keepers:
            instance.stop(signal.SIGKILL)

    async def _end(self, instances: Iterable[Instance], limit: float) -> None:
        """SIGTERM, then wait until these have ended, the limit is over, or a second signal came."""
        for instance in instances:
            if not self._keepers[instance].done():
                instance.stop(signal.SIGTERM)
        ended = asyncio.wait({self._keepers[instance] for instance in instances})
        race = {asyncio.create_task(ended), asyncio.create_task(self._signalled_again.wait())}
        await asyncio.wait(race, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for task in race:
            task.cancel()
        await asyncio.gather(*race, return_exceptions=True)

    def _on_signal(self) -> None:
        if self._signalled.is_set():
            self._signalled_again.set()
        self._signalled.set()

    def _on_orphaned(self) -> None:
        """Nobody is left for whom to drain."""
        asyncio.get_running_loop().remove_reader(int(os.environ[LIFELINE_VARIABLE]))
        self._signalled.set()
        self._signalled_again.set()

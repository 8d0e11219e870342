"""One service instance as a child process, started again with backoff when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from services.launcher.heartbeat import Heartbeat
from shared.pulse import PULSE_VARIABLE
from shared.service import LIFELINE_VARIABLE
from shared.settings import Settings
from shared.types import ServiceName

BACKOFF_SECONDS = 0.2  # before the first restart; doubles up to the maximum
BACKOFF_MAX_SECONDS = 10.0
STABLE_SECONDS = 10.0  # a life as long as the longest pause starts the backoff anew


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What children get from the launcher."""

    settings: Settings
    lifeline: int  # read end of a pipe that breaks when the launcher dies
    listener: int  # the HTTP socket, bound once and kept over restarts


class Instance:
    """One process of a service; the supervisor decides how often it lives."""

    def __init__(self, service: ServiceName, index: int, inheritance: Inheritance) -> None:
        self.service = service
        self.index = index
        self.stopping = asyncio.Event()  # no further life is wanted
        self._inheritance = inheritance
        self._process: Process | None = None
        self._log = structlog.get_logger("launcher")

    def __str__(self) -> str:
        return f"{self.service} {self.index}"

    async def live(self) -> int:
        """Run the process once; returns its exit code (negative: the signal that ended it).

        One that hangs is killed.
        """
        settings = self._inheritance.settings
        heartbeat = Heartbeat(settings.hang_timeout, settings.iteration_timeout)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**self._environment, PULSE_VARIABLE: str(heartbeat.writer)},
                pass_fds=[*self._descriptors, heartbeat.writer],
                start_new_session=True,  # Ctrl-C is for the launcher, which then drains in order
            )
            heartbeat.started()
            return await self._watch(self._process, heartbeat)
        finally:
            heartbeat.close()

    async def _watch(self, process: Process, heartbeat: Heartbeat) -> int:
        ended = asyncio.create_task(process.wait())
        while not ended.done():
            await asyncio.wait([ended], timeout=heartbeat.look_again)
            if not ended.done() and (problem := heartbeat.problem) is not None:
                self._log.error("service hangs, it is killed", instance=str(self), reason=problem)
                process.kill()
                break
        return await ended

    def stop(self, number: signal.Signals) -> None:
        """End it with this signal, for good."""
        self.stopping.set()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def _command(self) -> Sequence[str]:
        listener = self._inheritance.listener if self.service is ServiceName.GATEWAY else None
        settings = replace(self._inheritance.settings, index=self.index, listen_fd=listener)
        module = f"services.{self.service.replace('-', '_')}"
        # -P: a folder named `services` in the current directory is not ours
        return [sys.executable, "-P", "-m", module, *settings.to_flags(self.service)]

    @property
    def _environment(self) -> Mapping[str, str]:
        lifeline = {LIFELINE_VARIABLE: str(self._inheritance.lifeline)}
        return os.environ | self._inheritance.settings.to_environment() | lifeline

    @property
    def _descriptors(self) -> Sequence[int]:
        listener = [self._inheritance.listener] if self.service is ServiceName.GATEWAY else []
        return [self._inheritance.lifeline, *listener]


class Backoff:
    """How long to wait before the next life."""

    def __init__(self) -> None:
        self._seconds = BACKOFF_SECONDS

    def after(self, lived: float) -> float:
        """Seconds to wait after a life of `lived` seconds."""
        if lived > STABLE_SECONDS:
            self._seconds = BACKOFF_SECONDS
        pause, self._seconds = self._seconds, min(2 * self._seconds, BACKOFF_MAX_SECONDS)
        return pause

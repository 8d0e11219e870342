"""The probe: one token through every service, before the gateway calls itself ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from services.gateway.errors import ApiError
from services.gateway.flights import Flights
from services.gateway.readiness import Readiness
from services.gateway.request import GenerationRequest
from shared.messages import Prompt
from shared.sampling import SamplingParams

PROBE_SECONDS = 30.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.1, 5.0

PROBE = GenerationRequest(
    model="",
    prompts=[Prompt(text="ready?")],
    n=1,
    params=SamplingParams(seed=0, temperature=0.0, max_tokens=1, ignore_eos=True),
    stream=False,
    include_usage=False,
)


class Spawn(Protocol):
    def __call__(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]: ...


class Prober:
    """Runs while the mesh is whole and no probe has come through it; else nothing runs."""

    def __init__(
        self,
        readiness: Readiness,
        flights: Flights,
        possible: Callable[[], bool],
        spawn: Spawn,
    ) -> None:
        self._readiness = readiness
        self._flights = flights
        self._possible = possible
        self._spawn = spawn
        self._running = False

    def consider(self) -> None:
        """Something changed in the mesh: probe it, if that could tell anything new."""
        if not self._running and self._due:
            self._running = True
            self._spawn(self._probe_until_ready(), name="probe")

    @property
    def _due(self) -> bool:
        return self._possible() and not self._readiness.ready

    async def _probe_until_ready(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        try:
            while self._due:
                life = self._readiness.life
                if await self._probe():
                    self._readiness.passed(life)
                else:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE_SECONDS)
        finally:
            self._running = False

    async def _probe(self) -> bool:
        flight = self._flights.start(PROBE, time.perf_counter(), measured=False)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                while await flight.collector.changes():
                    pass
        except (ApiError, TimeoutError):
            return False
        finally:
            self._flights.close(flight, "probe ended")
        return True

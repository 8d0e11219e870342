"""A process that no launcher watches watches itself: one that hangs ends, to be started again."""

from __future__ import annotations

import asyncio
import faulthandler
import os
from collections.abc import Callable

import structlog

from shared.pulse import BEAT_SECONDS


class Watchdog:
    """Ends the process if its event loop, or what it counts, stands still; limits as Heartbeat's.

    Before it does, it writes to standard error what all threads were at.
    """

    def __init__(
        self, silence_limit: float, standstill_limit: float, count: Callable[[], int]
    ) -> None:
        self._silence_limit, self._standstill_limit = silence_limit, standstill_limit
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._last = -1
        self._moved = self._loop.time()
        self._beat()

    def _beat(self) -> None:
        if self._silence_limit:
            # From a thread that needs no lock of Python's: what hangs may hold it.
            faulthandler.dump_traceback_later(self._silence_limit, exit=True)
        if self._standstill_limit:
            self._look()
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def _look(self) -> None:
        now, count = self._loop.time(), self._count()
        if count != self._last:
            self._last, self._moved = count, now
        elif now >= self._moved + self._standstill_limit:
            reason = f"one iteration takes longer than {self._standstill_limit:g} s"
            structlog.get_logger("watchdog").error("service hangs, it ends", reason=reason)
            faulthandler.dump_traceback()
            os._exit(1)  # without waiting for the thread that hangs

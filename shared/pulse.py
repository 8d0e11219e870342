"""Signs of life of a process for the launcher that started it: beats over an inherited pipe."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from contextlib import suppress

PULSE_VARIABLE = "HEADRACE_PULSE_FD"  # write end of the pipe
BEAT_SECONDS = 1.0
BEAT = struct.Struct("<Q")


class Pulse:
    """Says every second how often something was done, from the event loop that is to be alive."""

    def __init__(self, descriptor: int, count: Callable[[], int]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._beat()

    def _beat(self) -> None:
        with suppress(OSError):  # nobody reads: the launcher is stopped, or dead
            os.write(self._descriptor, BEAT.pack(self._count()))
        self._loop.call_later(BEAT_SECONDS, self._beat)

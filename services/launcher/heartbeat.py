"""What the launcher hears of a child: whether it still turns, and whether it gets on."""

from __future__ import annotations

import asyncio
import os

from shared.pulse import BEAT

START_SECONDS = 100.0  # until the first beat; then an event loop runs
READ_BYTES = 4096


class Heartbeat:
    """The pipe of one life. Limits are in seconds; 0: none."""

    def __init__(self, silence_limit: float, standstill_limit: float) -> None:
        self._limits = silence_limit, standstill_limit
        self._loop = asyncio.get_running_loop()
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._count = -1
        self._heard = self._moved = self._loop.time() + START_SECONDS
        self._loop.add_reader(self._reader, self._read)

    def started(self) -> None:
        """The child has its end of the pipe."""
        os.close(self.writer)

    def close(self) -> None:
        self._loop.remove_reader(self._reader)
        os.close(self._reader)

    @property
    def look_again(self) -> float | None:
        """In so many seconds there may be a problem; None: there is no limit."""
        limits = [limit for limit in self._limits if limit]  # of the start, the end is not known
        ends = [
            since + limit
            for since, limit in zip((self._heard, self._moved), self._limits, strict=True)
            if limit
        ]
        return max(0.0, min(min(ends) - self._loop.time(), *limits)) if ends else None

    @property
    def problem(self) -> str | None:
        """Why the child counts as hung."""
        now, (silence, standstill) = self._loop.time(), self._limits
        if silence and now >= self._heard + silence:
            return f"no sign of life for {silence:g} s"
        if standstill and now >= self._moved + standstill:
            return f"one iteration takes longer than {standstill:g} s"
        return None

    def _read(self) -> None:
        beats = os.read(self._reader, READ_BYTES)
        if not beats:  # the child is gone
            self._loop.remove_reader(self._reader)
            return
        (count,) = BEAT.unpack(beats[-BEAT.size :])
        self._heard = self._loop.time()
        if count != self._count:
            self._count, self._moved = count, self._heard

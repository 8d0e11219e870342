"""Turning requests away while the server is full, so that those who are in do not notice."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from shared.rarely import Rarely

AT_ONCE = 24  # answers, one or two milliseconds of work
PAUSE_SECONDS = 0.001  # from these to the next, at least
PAUSE_TIMES = 0.5  # as long as these took, at least: a third of the time is for the others


class Refusals:
    """A client that comes again at once has to wait for its turn, and streams go on meanwhile."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_ONCE
        self._pausing = False
        self._rarely = Rarely("gateway")  # what has no room for requests has none for lines

    async def turn(self) -> None:
        """Wait until another answer may go out."""
        self._rarely.warning("the server is full, requests are refused")
        loop = asyncio.get_running_loop()
        if not self._pausing:
            self._pausing = True
            loop.call_later(PAUSE_SECONDS, self._go_on)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _go_on(self) -> None:
        self._left = AT_ONCE
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has left
                turn.set_result(None)
                self._left -= 1
        self._pausing = self._left < AT_ONCE
        if self._pausing:  # `_pause` is called when these have answered
            asyncio.get_running_loop().call_soon(self._pause, time.monotonic())

    def _pause(self, began: float) -> None:
        loop, took = asyncio.get_running_loop(), time.monotonic() - began
        loop.call_later(max(PAUSE_SECONDS, PAUSE_TIMES * took), self._go_on)

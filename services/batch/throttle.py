"""How many requests may be under way at once."""

from __future__ import annotations

import asyncio

SUCCESSES_PER_PLACE = 8


class Throttle:
    """Places for requests: one is lost with each refusal of a full server, and won back slowly.

    So the places that are left are as many as the server has room for, and a request that was
    refused does not compete with all others for the next one.
    """

    def __init__(self, most: int) -> None:
        self._room = asyncio.Semaphore(most)
        self._most = most
        self._successes = 0
        self.places = most

    async def enter(self) -> None:
        await self._room.acquire()

    def leave(self, *, full: bool = False) -> None:
        """`full`: the server had no room for this request."""
        if full and self.places > 1:
            self.places -= 1
            return
        self._room.release()
        if not full:
            self._succeed()

    def _succeed(self) -> None:
        self._successes += 1
        if self._successes >= SUCCESSES_PER_PLACE and self.places < self._most:
            self._successes = 0
            self.places += 1
            self._room.release()

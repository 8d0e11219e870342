"""Files that are read again when they change."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol, TypeAlias

LOOK_SECONDS = 5.0  # from one look at the files to the next

Stamp: TypeAlias = tuple[tuple[int, int, int, int], ...]


class Watched:
    def __init__(self, *files: str) -> None:
        """Raises OSError if one is not there."""
        self._files = files
        self._stamp = self._look()

    def changed(self) -> bool:
        """Whether they are others than at the last look; raises OSError."""
        before, self._stamp = self._stamp, ()  # what cannot be looked at is another by then
        self._stamp = self._look()
        return self._stamp != before

    def _look(self) -> Stamp:
        found = [os.stat(path) for path in self._files]  # through links: secrets are swapped so
        return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found)


class Refreshed(Protocol):
    def refresh(self) -> None:
        """Look, and take over what has changed."""


async def watch(one: Refreshed) -> None:
    """Have it look every few seconds, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        one.refresh()

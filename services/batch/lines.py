"""Lines of a file or pipe, read when they are wanted, without ever stopping the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

CHUNK = 1 << 18  # bytes
LONGEST_LINE = 16 << 20  # bytes; more than the largest body that a gateway takes


async def read_lines(descriptor: int) -> AsyncIterator[bytes | None]:
    """Each line without its end; None stands for one that is longer than LONGEST_LINE."""
    rest, too_long = b"", False
    async for chunk in _chunks(descriptor):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield None if too_long else line
            too_long = False
        if len(rest) > LONGEST_LINE:
            rest, too_long = b"", True
    if rest or too_long:
        yield None if too_long else rest


async def _chunks(descriptor: int) -> AsyncIterator[bytes]:
    while True:
        await _readable(descriptor)
        if not (chunk := os.read(descriptor, CHUNK)):
            return
        yield chunk


async def _readable(descriptor: int) -> None:
    """Wait until a pipe or terminal has something; a file always has."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:  # which is how the system says that it is a file
        await asyncio.sleep(0)
        return
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)

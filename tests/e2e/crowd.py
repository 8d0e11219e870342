"""Many clients at once, each with a connection of its own, in one thread that is cheap to run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.harness import MODEL

PATIENCE = 120.0  # seconds for all of them

Pace = Callable[[], Awaitable[None]]


@dataclass
class Answer:
    """All that came over one connection, in pieces as it came; loop time, seconds."""

    asked: float
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each piece

    @cached_property
    def _parts(self) -> tuple[bytes, bytes]:
        head, blank, body = b"".join(self.pieces).partition(b"\r\n\r\n")
        assert blank, head
        return head, body

    @property
    def status(self) -> int:
        return int(self._parts[0].split()[1])

    @property
    def head(self) -> str:
        return self._parts[0].decode().lower()

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of a stream that came to its end."""
        assert self.status == 200, self._parts
        lines = re.findall(rb"data: (.*)\n", self._parts[1])
        assert lines[-1] == b"[DONE]", lines[-1:]
        return [json.loads(line) for line in lines[:-1]]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event["choices"])


async def post(
    url: str, body: dict[str, Any], size: int = 65536, pace: Pace | None = None
) -> Answer:
    """`pace` is waited for before each piece, of `size` bytes at most, is read."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    content = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    )
    answer = Answer(asyncio.get_running_loop().time())
    try:
        while True:
            if pace is not None:
                await pace()
            if not (piece := await reader.read(size)):
                return answer
            answer.pieces.append(piece)
            answer.times.append(asyncio.get_running_loop().time())
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def crowd(url: str, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*(post(url, body) for body in bodies))

"""A cheap client for many SSE streams at once, so that a benchmark measures the server.

It reads raw bytes and counts words, which are tokens on a simulated accelerator, however many of
them an event bears. A parsing client would cost more CPU per token than the gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

EVENT = b'data: {"'
END = b"data: [DONE]"
COMMENT = b": keep-a"  # as long as EVENT, so that none is found twice


@dataclass(slots=True)
class StreamRecord:
    """What one stream delivered; times are perf_counter seconds."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # one per token
    events: list[float] = field(default_factory=list)  # for texts whose tokens are no words
    status: int = 0
    done: bool = False

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def per_token(self) -> float:
        """Mean seconds per token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)


class StreamError(Exception):
    """The server did not do what the benchmark needs."""


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._tokens = 0
        self.record = StreamRecord(time.perf_counter())
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()  # done with the first bytes
        self.closed: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.record.sent = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.record.status:
            self.record.status = int(data[9:12])
            data = data.partition(b"\r\n\r\n")[2]
        text = self._tail + data
        events = text.count(EVENT)
        self.record.events += [now] * events
        # Each event has one space beside those of its words; so have comments and the end.
        self._tokens += data.count(b" ") - events - text.count(COMMENT) - text.count(END)
        arrivals = self.record.arrivals
        arrivals += [now] * (self._tokens - len(arrivals))
        if arrivals and not self.begun.done():
            self.begun.set_result(None)
        if END in text:
            del arrivals[self._tokens :]
            self.record.done = True
            self.transport.close()
        # Keep what may be the beginning of a marker, but never a whole one again.
        self._tail = text[-(len(EVENT) - 1) :]

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.begun, self.closed):
            if not future.done():
                future.set_result(None)


async def _open(url: str, body: dict[str, Any]) -> _Connection:
    parts = urlsplit(url)
    content = json.dumps(body | {"stream": True}).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: _Connection(head.encode() + content), parts.hostname or "", parts.port or 80
    )
    return connection


async def stream(url: str, body: dict[str, Any]) -> StreamRecord:
    """POST one streaming request and read it to its end."""
    connection = await _open(url, body)
    await connection.closed
    return connection.record


@asynccontextmanager
async def held_streams(url: str, bodies: list[dict[str, Any]]) -> AsyncIterator[list[StreamRecord]]:
    """Streams that all have their first token; they are cut off at the end.

    Raises StreamError if one was refused, or ended before that.
    """
    connections = await asyncio.gather(*(_open(url, body) for body in bodies))
    try:
        await asyncio.gather(*(connection.begun for connection in connections))
        yield [connection.record for connection in connections]
        if ended := [c.record for c in connections if c.closed.done() or c.record.status != 200]:
            raise StreamError(f"{len(ended)} streams ended early, with status {ended[0].status}")
    finally:
        for connection in connections:
            connection.transport.close()
        await asyncio.gather(*(connection.closed for connection in connections))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

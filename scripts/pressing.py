"""Clients that press a server: each comes again as soon as it was answered, or when it was told to.

They are raw protocols: on a small machine a generator that parses what it gets would take the CPU
from the server. What a busy generator adds to the times it measures is measured, too.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

EVENT = b'data: {"'
END = b"data: [DONE]"
LAG_SECONDS = 0.005


@dataclass
class Tally:
    """What became of the requests of all clients; times in seconds."""

    statuses: Counter[int] = field(default_factory=Counter)
    refused: list[float] = field(default_factory=list)  # from a request to its 429
    waits: list[int] = field(default_factory=list)  # that these told of
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)  # the mean of each finished stream
    gaps: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)  # how late the generator's own loop was
    faults: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget what was so far."""
        for one in vars(self).values():
            one.clear()


class Client(asyncio.Protocol):
    """One connection, kept alive: one request after the other."""

    def __init__(self, request: bytes, tally: Tally, *, patient: bool) -> None:
        self._request = request
        self._tally = tally
        self._patient = patient  # waits as long as it is told to
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._leaving = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._begin()

    def _begin(self) -> None:
        self._head = b""
        self._status = 0
        self._tail = b""
        self._arrivals: list[float] = []
        self._sent = time.perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._ask()

    def _ask(self) -> None:
        self._begin()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._status:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            if head[9:12] != b"200":
                if len(data) == _length(head):
                    self._refused(head, now)
                return
            self._status = 200
        text = self._tail + data
        self._arrivals += [now] * text.count(EVENT)
        if END in text and text.endswith(b"0\r\n\r\n"):
            self._finished()
        else:
            self._tail = text[-(len(END) + 12) :].replace(EVENT, b"")

    def _refused(self, head: bytes, now: float) -> None:
        tally, status = self._tally, int(head[9:12])
        tally.statuses[status] += 1
        wait = re.search(rb"\r\nretry-after: (\d+)", head, re.IGNORECASE)
        if status != 429 or wait is None:
            tally.faults[head.partition(b"\r\n")[0].decode()] += 1
            self._again = self._loop.call_later(1.0, self._ask)
            return
        tally.refused.append(now - self._sent)
        tally.waits.append(int(wait[1]))
        if self._patient:
            self._again = self._loop.call_later(int(wait[1]), self._ask)
        else:
            self._ask()

    def _finished(self) -> None:
        tally, arrivals = self._tally, self._arrivals
        tally.statuses[200] += 1
        tally.first.append(arrivals[0] - self._sent)
        tally.per_token.append((arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))
        tally.gaps += [after - before for before, after in pairwise(arrivals)]
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if self._again is not None:
            self._again.cancel()
        if not self._leaving:
            self._tally.faults[f"connection lost: {error!r}"] += 1
        self.closed.set_result(None)

    def leave(self) -> None:
        self._leaving = True
        self._transport.abort()


def _length(head: bytes) -> int:
    found = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else -1


@asynccontextmanager
async def pressing(
    url: str, clients: int, body: dict[str, Any], *, patient: bool
) -> AsyncIterator[Tally]:
    """So many clients ask for streams until the block ends; a second passes in which they come."""
    parts = urlsplit(url)
    content = json.dumps(body | {"stream": True}).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    tally, loop = Tally(), asyncio.get_running_loop()
    lag = asyncio.create_task(_measure_lag(tally))
    here: list[Client] = []
    try:
        for _ in range(clients):
            _, client = await loop.create_connection(
                lambda: Client(head.encode() + content, tally, patient=patient),
                parts.hostname or "",
                parts.port or 80,
            )
            here.append(client)
        yield tally
    finally:
        lag.cancel()
        for client in here:
            client.leave()
        await asyncio.gather(lag, *(client.closed for client in here), return_exceptions=True)


@asynccontextmanager
async def kept_alive(url: str, count: int) -> AsyncIterator[None]:
    """So many connections that have asked for something once, and are silent since."""
    parts = urlsplit(url)
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(count):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writers.append(writer)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(_length(head))
        yield
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*(one.wait_closed() for one in writers), return_exceptions=True)


async def _measure_lag(tally: Tally) -> None:
    while True:
        due = time.perf_counter() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        tally.lag.append(time.perf_counter() - due)

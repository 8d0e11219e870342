"""A cheap client for many SSE streams at once, so that a benchmark measures the server.

It reads raw bytes and counts events; a parsing client costs more CPU per token than the gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

EVENT = b'data: {"'
END = b"data: [DONE]"


@dataclass(slots=True)
class StreamRecord:
    """What one stream delivered; times are perf_counter seconds."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # one per event that carries a token
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


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.record = StreamRecord(time.perf_counter())
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.record.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.record.status:
            self.record.status = int(data[9:12])
        text = self._tail + data
        self.record.arrivals += [now] * text.count(EVENT)
        if END in text:
            self.record.done = True
            self._transport.close()
        # Keep what may be the beginning of a marker, but never a whole one again.
        self._tail = text[-(len(EVENT) - 1) :]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def stream(url: str, body: dict[str, Any]) -> StreamRecord:
    """POST one streaming request and read it to its end. The last event bears no token."""
    parts = urlsplit(url)
    content = json.dumps(body | {"stream": True}).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: _Connection(head.encode() + content), parts.hostname or "", parts.port or 80
    )
    await connection.closed
    return connection.record


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

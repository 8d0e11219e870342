"""More connections than there is room for, and clients that send or take too slowly."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from structlog.testing import capture_logs

from services.gateway import connection, http_protocol, server
from services.gateway.handles import EXCESS, FEWEST, RESERVED, room
from shared.messages import Abort, Generate
from shared.types import FinishReason
from tests.services.gateway.scripted_mesh import ScriptedMesh, background, until

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Connection:
    """A client's side of one, with little room for what it does not read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def post(self, path: str, **body: Any) -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        length = f"content-length: {len(content)}\r\n\r\n"
        self.writer.write((head + length).encode() + content)

    async def answer(self) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers of an answer whose body has a known length."""
        async with asyncio.timeout(20):
            head = await self._reader.readuntil(b"\r\n\r\n")
            status, *lines = head.lower().split(b"\r\n")
            headers = dict(line.split(b": ", 1) for line in lines if line)
            await self._reader.readexactly(int(headers[b"content-length"]))
        return int(status.split()[1]), headers

    async def ended(self) -> None:
        async with asyncio.timeout(20):
            assert not await self._reader.read(1)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """Its pieces of the system's memory are small."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, (host, port))
    reader, writer = await asyncio.open_connection(sock=own, limit=1024)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def ask_health(url: str) -> int:
    async with connected(url) as one:
        one.writer.write(HEALTH)
        return (await one.answer())[0]


async def test_more_connections_than_wanted_are_told_so(
    mesh: ScriptedMesh, tiny_model: Path
) -> None:
    url = await mesh.start_gateway(tiny_model, max_connections=2)
    async with connected(url) as first, connected(url) as second, connected(url) as third:
        for one in (first, second):
            one.writer.write(HEALTH[:-2])  # not idle: it is in the midst of a request
        await asyncio.sleep(0.05)
        third.writer.write(HEALTH)
        status, headers = await third.answer()
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert headers[b"connection"] == b"close"
        await third.ended()
        for one in (first, second):
            one.writer.write(b"\r\n")
            assert (await one.answer())[0] == 200
            one.writer.write(HEALTH[:-2])
        first.writer.close()
        await until(lambda: len(connections(mesh)) == 1)
        async with connected(url) as fourth:
            fourth.writer.write(HEALTH)
            assert b"retry-after" not in (await fourth.answer())[1]


def connections(mesh: ScriptedMesh) -> set[Any]:
    held = mesh.gateways[0]._server
    assert held is not None
    found: set[Any] = held._server.server_state.connections
    return found


async def test_one_that_is_only_kept_alive_makes_room(mesh: ScriptedMesh, tiny_model: Path) -> None:
    url = await mesh.start_gateway(tiny_model, max_connections=1)
    async with connected(url) as idle:
        idle.writer.write(HEALTH)
        await idle.answer()
        assert await ask_health(url) == 200
        await idle.ended()


async def test_beyond_all_bounds_they_wait(
    mesh: ScriptedMesh, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither refused nor reset: the system holds them until there is room."""
    monkeypatch.setattr(server, "EXCESS", 1)
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 20.0)
    url = await mesh.start_gateway(tiny_model, max_connections=1)
    async with connected(url) as held, connected(url) as excess:
        held.writer.write(HEALTH[:-2])
        await until(lambda: len(connections(mesh)) == 2)
        async with background(ask_health(url)) as waiting:
            await asyncio.sleep(0.1)
            assert not waiting.done()
            assert len(connections(mesh)) == 2
            held.writer.close()
            excess.writer.close()
            assert await waiting == 200


@pytest.mark.parametrize(
    ("wanted", "limit", "found"),
    [
        (4096, -1, 4096),
        (4096, 1 << 20, 4096),
        (4096, 1024, 1024 - RESERVED - EXCESS),
        (4096, 64, FEWEST),
        (8, 64, 8),
    ],
)
def test_room_by_open_files(wanted: int, limit: int, found: int) -> None:
    assert room(wanted, limit) == found


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_takes_nothing_is_cut(
    mesh: ScriptedMesh,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    streaming: bool,
) -> None:
    """In the midst of a stream, or with a whole answer that is only to be taken."""
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 0.2)
    with capture_logs() as lines:
        async with connected(str(client.base_url)) as slow:
            slow.post("/v1/completions", prompt="x", max_tokens=50, stream=streaming)
            request = await mesh.tokenizer.hear(Generate)
            mesh.accept(request)
            for _ in range(20):
                mesh.delta(request, "x" * 50_000)
            if streaming:
                assert (await mesh.scheduler.hear(Abort)).reason == "client too slow"
            else:
                mesh.delta(request, "", FinishReason.LENGTH)
            await until(lambda: len(connections(mesh)) == 1)
        told = [line for line in lines if "client too slow" in line.values()]
    assert len(told) == 1
    assert told[0]["request_id"]
    assert not mesh.gateways[0].busy


async def test_a_client_that_takes_some_is_not_cut(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 0.3)
    async with connected(str(client.base_url)) as slow:
        slow.post("/v1/completions", prompt="x", max_tokens=50, stream=False)
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request)
        for _ in range(10):
            mesh.delta(request, "x" * 50_000)
        mesh.delta(request, "", FinishReason.LENGTH)
        left = 500_000
        while left > 0:
            left -= len(await asyncio.wait_for(slow._reader.read(50_000), 20))
            await asyncio.sleep(0.01)


async def test_a_body_that_drips_after_a_refusal(
    mesh: ScriptedMesh, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it any more, but the connection ends all the same."""
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.2)
    url = await mesh.start_gateway(tiny_model)
    async with connected(url) as slow:
        slow.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n"
        )
        assert (await slow.answer())[0] == 503  # it has no mesh: told before the body
        async with asyncio.timeout(20):
            while not slow.writer.is_closing() and not slow._reader.at_eof():
                slow.writer.write(b"x")
                await asyncio.sleep(0.01)


async def test_a_body_that_drips(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for so long, and holds nobody up."""
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.3)

    async def drip(one: Connection) -> None:
        while True:
            one.writer.write(b" ")
            await asyncio.sleep(0.01)

    async with connected(str(client.base_url)) as slow:
        slow.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100000\r\n\r\n"
        )
        async with background(drip(slow)):
            assert (await client.get("/health")).status_code == 200
            status, headers = await slow.answer()
        assert (status, headers[b"connection"]) == (408, b"close")

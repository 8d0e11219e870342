"""Requests that two servers could read differently: none becomes two, and none gets in by that."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest

SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % (len(SMUGGLED) + 5)
CHUNKED = b"transfer-encoding: chunked\r\n"
END = b"0\r\n\r\n"


async def answers(client: httpx.AsyncClient, *pieces: bytes) -> bytes:
    """All that is answered until the server closes, or is silent."""
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(b"".join(pieces))
        read = b""
        while True:
            async with asyncio.timeout(1):
                piece = await reader.read(65536)
            if not piece:
                return read
            read += piece
    except TimeoutError:
        return read
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        POST + LENGTH + CHUNKED,
        POST + CHUNKED + LENGTH,
        POST + b"content-length: 5\r\ncontent-length: 6\r\n",
        POST + b"content-length: 5, 6\r\n",
        POST + b"content-length: +5\r\n",
        POST + b"content-length: -5\r\n",
        POST + b"content-length: 0x5\r\n",
        POST + b"content-length : 5\r\n",
        POST + b"transfer-encoding : chunked\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n",
        POST + b"transfer-encoding: xchunked\r\n" + LENGTH,
        POST + b"transfer-encoding: identity\r\n" + LENGTH,
        POST + b"x: a\rcontent-length: 5\r\n",
        POST + b"x: a\x00b\r\n" + CHUNKED,
        POST + b"x\x00y: a\r\n" + CHUNKED,
        POST + b"x y: a\r\n" + CHUNKED,
        POST + b"content-length: 99999999999999999999999\r\n",
        b"POST /v1/completions HTTP/1.1\nhost: x\ncontent-length: 5\n transfer-encoding: chunked\n",
        b"POST /v1/completions HTTP/9.9\r\nhost: x\r\n",
        b"POST /v1/comp letions HTTP/1.1\r\nhost: x\r\n",
    ],
)
async def test_an_ambiguous_request_ends_its_connection(
    client: httpx.AsyncClient, head: bytes
) -> None:
    read = await answers(client, head, b"\r\n", END, SMUGGLED, SMUGGLED)
    assert read.count(b"HTTP/1.1 ") <= 1
    assert b"HTTP/1.1 200" not in read and b'"object":"list"' not in read
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "chunk", [b"-1\r\n", b"5\r\nabcdeX", b"0x5\r\nabcde\r\n", b"fffffffffffffffff\r\n"]
)
async def test_a_broken_chunk_ends_its_connection(client: httpx.AsyncClient, chunk: bytes) -> None:
    read = await answers(client, POST, CHUNKED, b"\r\n", chunk, END, SMUGGLED)
    assert b"HTTP/1.1 200" not in read
    assert (await client.get("/health")).status_code == 200


async def test_request_ids_bring_nothing_into_logs_or_headers(client: httpx.AsyncClient) -> None:
    sent = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: "
    for name in (b"a\tb", b"\x1b[31mred", b"a\xc3\xa9b", b"\x7f", b'"},{"level":"error'):
        read = await answers(client, sent, name, b"\r\n\r\n")
        told = [line for line in read.split(b"\r\n") if line.lower().startswith(b"x-request-id")]
        if told:  # else the parser refused it
            assert len(told) == 1 and all(0x20 <= byte < 0x7F for byte in told[0])
    assert b"HTTP/1.1 200" in await answers(client, sent, b"fine\r\n\r\n")


async def test_the_page_of_documents_runs_nothing_unchecked(client: httpx.AsyncClient) -> None:
    page = (await client.get("/docs")).text
    foreign = re.findall(r"<(?:script|link)[^>]*https?://[^>]*>", page)
    assert len(foreign) == 2
    assert all(
        re.search(r"@\d+\.\d+\.\d+/", one) and 'integrity="sha384-' in one for one in foreign
    )

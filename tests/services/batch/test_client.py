"""Asking until there is an answer."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from services.batch.client import Client, _retry_after
from services.batch.failures import RequestFailed, ServerGone
from tests.services.batch.conftest import CutOff, ScriptedServer, completion, echo

PATH, BODY = "/v1/completions", json.dumps({"prompt": "x"}).encode()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Notes how long would have been waited."""
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("asyncio.sleep", note)
    return pauses


def fail_first(times: int, status: int, **headers: str) -> Any:
    left = iter(range(times))

    async def act(body: dict[str, Any]) -> web.Response:
        if next(left, None) is None:
            return await echo(body)
        error = {"error": {"message": "later", "code": "busy"}}
        return web.json_response(error, status=status, headers=headers)

    return act


async def test_an_answer(server: ScriptedServer) -> None:
    async with Client(server.url + "/v1/", api_key="key", window=2) as client:
        answer = await client.ask(PATH, BODY, "my-id")
    assert answer.body["choices"][0]["text"] == "<x>"
    assert answer.failure is None
    assert server.headers[0]["Authorization"] == "Bearer key"
    assert server.headers[0]["x-request-id"] == "my-id"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_server_is_asked_again(
    server: ScriptedServer, no_pauses: list[float], status: int
) -> None:
    server.act = fail_first(3, status, **{"Retry-After": "7"})
    async with Client(server.url, window=2) as client:
        assert (await client.ask(PATH, BODY)).status == 200
    assert no_pauses == [7, 7, 7]


async def test_pauses_grow(server: ScriptedServer, no_pauses: list[float]) -> None:
    server.act = fail_first(9, 503)
    async with Client(server.url, window=2) as client:
        assert (await client.ask(PATH, BODY)).status == 200
    for tries, pause in enumerate(no_pauses):
        longest = min(0.5 * 2**tries, 60)
        assert longest / 2 <= pause <= longest


async def test_the_last_refusal_is_the_answer(server: ScriptedServer) -> None:
    server.act = fail_first(100, 429)
    async with Client(server.url, window=2, retries=4) as client:
        answer = await client.ask(PATH, BODY)
    assert len(server.bodies) == 5
    assert answer.status == 429
    assert answer.failure is not None
    assert (answer.failure.message, answer.failure.code) == ("later", "busy")


@pytest.mark.parametrize("status", [400, 404, 413, 500])
async def test_a_refusal_for_good_is_not_repeated(server: ScriptedServer, status: int) -> None:
    server.act = fail_first(1, status)
    async with Client(server.url, window=2) as client:
        assert (await client.ask(PATH, BODY)).status == status
    assert len(server.bodies) == 1


async def test_a_broken_connection_is_tried_again(server: ScriptedServer) -> None:
    left = iter(range(2))

    async def act(body: dict[str, Any]) -> web.Response:
        if next(left, None) is None:
            return completion("at last")
        raise CutOff

    server.act = act
    async with Client(server.url, window=2) as client:
        assert (await client.ask(PATH, BODY)).body["choices"][0]["text"] == "at last"
    assert len(server.bodies) == 3


async def test_nobody_there(no_pauses: list[float]) -> None:
    async with Client("http://127.0.0.1:1", window=2, retries=3) as client:
        with pytest.raises(RequestFailed, match=r"no answer in 4 tries: .*Connect"):
            await client.ask(PATH, BODY)
        with pytest.raises(ServerGone, match=r"http://127.0.0.1:1 does not answer"):
            await client.probe()
    assert len(no_pauses) == 3


async def test_a_server_known_to_be_gone_is_not_asked_again() -> None:
    def gone() -> None:
        raise ServerGone("it ended")

    async with Client("unix:/no/such/socket", window=2, check=gone) as client:
        with pytest.raises(ServerGone, match="it ended"):
            await client.ask(PATH, BODY)
        with pytest.raises(ServerGone, match="it ended"):
            await client.wait_ready()


async def test_a_wrong_key_is_told_at_once(server: ScriptedServer) -> None:
    async with Client(server.url, api_key="wrong", window=2) as client:
        with pytest.raises(ServerGone, match="answered 401, no such key"):
            await client.probe()
    async with Client(server.url, window=2) as client:
        await client.probe()


async def test_whoever_cancels_closes_the_connection(server: ScriptedServer) -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()
    here = asyncio.get_running_loop()

    async def act(body: dict[str, Any]) -> web.Response:
        here.call_soon_threadsafe(arrived.set)
        try:
            return await asyncio.Future()  # for ever
        finally:
            here.call_soon_threadsafe(gone.set)

    server.act = act
    async with Client(server.url, window=1) as client:
        asking = asyncio.create_task(client.ask(PATH, BODY))
        async with asyncio.timeout(20):
            await arrived.wait()
            asking.cancel()
            await gone.wait()
        server.act = echo
        assert (await client.ask(PATH, BODY)).status == 200  # its place is free again


@pytest.fixture
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield str(Path(directory) / "s")


async def test_over_a_unix_socket(
    server: ScriptedServer, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    server.listen_unix(socket_path)
    async with Client(f"unix:{socket_path}", window=2) as client:
        assert (await client.ask(PATH, BODY)).status == 200


@pytest.mark.parametrize(
    ("content", "reason"), [("<html>", "status 500: <html>"), ('["x"]', r"status 500: \['x'\]")]
)
async def test_answers_of_no_known_form(server: ScriptedServer, content: str, reason: str) -> None:
    async def act(body: dict[str, Any]) -> web.Response:
        return web.Response(text=content, status=500)

    server.act = act
    async with Client(server.url, window=2) as client:
        failure = (await client.ask(PATH, BODY)).failure
    with pytest.raises(RequestFailed, match=reason):
        raise failure or AssertionError


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", ""])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"no http address|[Pp]ort"):
        Client(url)


def test_a_key_that_no_header_can_hold() -> None:
    with pytest.raises(ValueError, match="characters"):
        Client("http://x", api_key="two\nlines")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7), ("", 0), ("soon", 0), ("-5", 0), ("99999999", 600), ("²", 0)],
)
def test_retry_after(value: str, seconds: float) -> None:
    assert _retry_after(value) == seconds


def test_retry_after_a_date() -> None:
    assert 50 < _retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert _retry_after(formatdate(0, usegmt=True)) == 0

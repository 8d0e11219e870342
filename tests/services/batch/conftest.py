"""A server that answers as a test wants, and notes what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest
from aiohttp import web

Act = Callable[[dict[str, Any]], Awaitable[web.Response]]


class CutOff(Exception):
    """Raised by an act: the connection breaks without an answer."""


def completion(text: str, tokens: int = 1) -> web.Response:
    choices = [{"index": 0, "text": text, "finish_reason": "stop"}]
    return web.json_response({"choices": choices, "usage": {"completion_tokens": tokens}})


async def echo(body: dict[str, Any]) -> web.Response:
    return completion(f"<{body['prompt']}>")


class ScriptedServer:
    """In a thread of its own, so that callers may block."""

    def __init__(self) -> None:
        self.act: Act = echo
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.running = self.most = self.left = 0  # `left`: clients that went away
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._runner = self._run(self._start())
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def forever(self) -> None:
        """Until the client leaves."""
        await self.loop.create_future()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def listen_unix(self, path: str) -> None:
        """On a unix socket, too."""
        self._run(web.UnixSite(self._runner, path).start())

    async def _models(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") == "Bearer wrong":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return web.json_response({"data": []})

    async def _answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.act(body)
        except CutOff:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1

    def close(self) -> None:
        self._run(self._runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()

"""Asking a server: one request until it has an answer, however often that takes."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from services.batch.failures import NO_ANSWER, RequestFailed, ServerGone, failure_of
from services.batch.throttle import Throttle
from shared.unix_socket import PREFIX

WINDOW = 256  # requests under way at once
RETRIES = 10  # with the pauses below, over four minutes
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds; doubles from one to the other
LONGEST_RETRY_AFTER = 600.0  # seconds, whatever the server says
CONNECT_SECONDS = 20.0
READY_SECONDS = 0.1  # between two questions whether it is ready
FULL = 429
AGAIN = frozenset({FULL, 502, 503, 504})
LOSSES = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Answer:
    """Any HTTP answer; `body` is parsed JSON, or text where it was none."""

    status: int
    request_id: str
    body: Any
    retry_after: float = 0.0  # seconds

    @property
    def failure(self) -> RequestFailed | None:
        return failure_of(self.status, self.body)


class Client:
    """Connections to `url`, which is http(s)://... or unix:PATH; an asynchronous context manager.

    `check` is called when a connection breaks: it raises ServerGone if the server is known to
    have ended. Raises ValueError for a url or key that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        window: int = WINDOW,
        retries: int = RETRIES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._place = url
        self._base = _base(url)
        self._headers = _headers(api_key)
        self.window = window
        self._retries = retries
        self._check = check
        self._throttle = Throttle(window)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        is_unix = self._place.startswith(PREFIX)
        self._session = aiohttp.ClientSession(
            connector=_unix(self._place) if is_unix else _tcp(),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            trust_env=not is_unix,  # proxies
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, path: str, body: bytes, request_id: str = "") -> Answer:
        """POST a JSON body; raises RequestFailed if no answer comes, ServerGone.

        A server that is full or away is asked again, later each time. Whoever cancels this closes
        the connection, so that the server stops working on it.
        """
        headers = {"x-request-id": request_id} if request_id else {}
        for tries in count(1):
            try:
                answer = await self._post(path, body, headers)
            except LOSSES as error:
                self._check()
                if tries > self._retries:
                    raise _no_answer(tries, error) from error
                await asyncio.sleep(_pause(tries))
            else:
                if answer.status not in AGAIN or tries > self._retries:
                    return answer
                await asyncio.sleep(max(_pause(tries), answer.retry_after))
        raise AssertionError("unreachable")

    async def probe(self) -> None:
        """Raises ServerGone if nobody answers there, or the key is refused."""
        try:
            answer = await self._request("GET", "/v1/models")
        except LOSSES as error:
            raise ServerGone(f"{self._place} does not answer: {_reason(error)}") from error
        if answer.status in (401, 403):
            raise ServerGone(f"{self._place} answered {answer.status}, {answer.failure}")

    async def wait_ready(self) -> None:
        """Return once the server can generate; raises ServerGone when `check` does."""
        while True:
            self._check()
            try:
                if (await self._request("GET", "/ready")).status == 200:
                    return
            except LOSSES:
                pass  # it does not listen yet
            await asyncio.sleep(READY_SECONDS)

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        await self._throttle.enter()
        full = False
        try:
            answer = await self._request("POST", path, data=body, headers=headers)
            full = answer.status == FULL
            return answer
        finally:
            self._throttle.leave(full=full)

    async def _request(self, method: str, path: str, **options: Any) -> Answer:
        assert self._session is not None
        async with self._session.request(method, self._base + path, **options) as response:
            return Answer(
                status=response.status,
                request_id=response.headers.get("x-request-id", ""),
                body=_parsed(await response.read()),
                retry_after=_retry_after(response.headers.get("retry-after", "")),
            )


def _base(url: str) -> str:
    if url.startswith(PREFIX):
        return "http://localhost"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no http address")
    _ = parts.port  # raises ValueError
    return url.rstrip("/").removesuffix("/v1")


def _headers(api_key: str) -> dict[str, str]:
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key has characters that a header cannot hold")
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"content-type": "application/json", **key}


def _unix(place: str) -> aiohttp.BaseConnector:
    return aiohttp.UnixConnector(place.removeprefix(PREFIX), limit=0)


def _tcp() -> aiohttp.BaseConnector:
    return aiohttp.TCPConnector(limit=0, socket_factory=_alive_socket)  # the throttle limits


def _alive_socket(address: tuple[Any, ...]) -> socket.socket:
    """Answers may take hours, so it is the system that notices when the other side vanished."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    return made


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")


def _retry_after(value: str) -> float:
    """Seconds; the header holds them, or a date."""
    try:
        if value.isdecimal():
            seconds = float(value)
        else:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def _pause(tries: int) -> float:
    longest: float = min(FIRST_PAUSE * 2 ** (tries - 1), LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)  # so that those refused together do not come together


def _no_answer(tries: int, error: BaseException) -> RequestFailed:
    return RequestFailed(f"no answer in {tries} tries: {_reason(error)}", code=NO_ANSWER)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

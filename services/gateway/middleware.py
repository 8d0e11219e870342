"""What holds for every route: keys, request ids, the date, and connections that are to end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import ApiError, error_response
from services.gateway.keys import ApiKeys
from shared.messages import Failure

OPEN_PATHS = frozenset({"/health", "/ready", "/v2/health/live", "/v2/health/ready"})
MAX_REQUEST_ID = 128

Headers = list[tuple[bytes, bytes]]


class CommonHeaders:
    """Adds `x-request-id` (the client's, if it sent one) and `date` to every answer."""

    def __init__(self, app: ASGIApp, closing: Callable[[], bool]) -> None:
        self._app = app
        self._closing = closing  # whether connections are to end with their answer
        self._second = 0
        self._date = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = _request_id(scope["headers"])
        scope["headrace.request_id"] = sent or uuid.uuid4().hex
        scope["headrace.named"] = sent is not None

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = scope["headrace.request_id"].encode()
                added = [(b"date", self._now()), (b"x-request-id", request_id)]
                if self._closing():
                    added.append((b"connection", b"close"))
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _now(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second, self._date = second, formatdate(second, usegmt=True).encode()
        return self._date


class KeyCheck:
    """Refuses whoever sends none of the keys, whatever the path: a route cannot be forgotten.

    Whoever sends one is known by its name from there on, as `headrace.key` of the scope.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _sent_key(scope["headers"])
        name = None if key is None else self._keys.name_of(key)
        if name is not None or scope["path"] in OPEN_PATHS:
            scope["headrace.key"] = name
            await self._app(scope, receive, send)
            return
        message = "Send a valid API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        error = ApiError(
            Failure(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key"),
            {"www-authenticate": "Bearer"},
        )
        await error_response(error, scope["path"])(scope, receive, send)


def name_request(scope: Scope, name: str | None) -> None:
    """Let a request go by the name in its body, if there is one and no header gave another."""
    if name is not None and not scope["headrace.named"]:
        scope["headrace.request_id"] = name


def _sent_key(headers: Headers) -> bytes | None:
    """As OpenAI's clients send it, or else as Anthropic's do."""
    for wanted in (b"authorization", b"x-api-key"):
        given = [value for name, value in headers if name == wanted]
        if len(given) > 1:
            return None
        if given and wanted == b"x-api-key":
            return given[0]
        if given:
            scheme, _, key = given[0].partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None


def _request_id(headers: Headers) -> str | None:
    """What the client sent, without what a header or a log line could not bear."""
    for name, value in headers:
        if name == b"x-request-id":
            kept = bytes(byte for byte in value[:MAX_REQUEST_ID] if 0x20 < byte < 0x7F)
            if kept:
                return kept.decode()
    return None

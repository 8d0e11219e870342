"""The two ways in which clients make trouble: bodies that never end, and leaving early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ApiError, ClientLeft, error_body_at
from shared.messages import Failure

CLIENT_CLOSED_REQUEST = 499  # as nginx calls it
BODY_SECONDS = 60.0
LINGER_SECONDS = 1.0  # that a client may go on sending what nobody will read

T = TypeVar("T")


class BodyTooLarge(ApiError):
    def __init__(self, limit: int) -> None:
        message = f"The request's body is larger than {limit} bytes."
        failure = Failure(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large")
        super().__init__(failure, {"connection": "close"})


async def read_json(request: Request, limit: int) -> bytes:
    """The body of a JSON request; raises ApiError, ClientDisconnect."""
    _check_type(request)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise BodyTooLarge(limit)
    except TimeoutError:
        message = f"The body did not arrive within {BODY_SECONDS:.0f} seconds."
        failure = Failure(HTTPStatus.REQUEST_TIMEOUT, message)
        raise ApiError(failure, {"connection": "close"}) from None
    return bytes(body)


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    coding = request.headers.get("content-encoding", "identity").lower()
    if kind != "application/json" or coding != "identity":
        message = "Send the body as plain JSON, with the header 'Content-Type: application/json'."
        raise ApiError(Failure(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message))


class TooLargeResponse(JSONResponse):
    """413, complete at once; then the rest of the body is read for a moment and dropped.

    A connection that is closed while the client still sends is reset, and with that the answer
    may be lost before the client has read it.
    """

    def __init__(self, error: BodyTooLarge, path: str) -> None:
        body = error_body_at(path, error.failure)
        super().__init__(body, error.failure.status, error.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def on_body_too_large(request: Request, error: Exception) -> Response:
    assert isinstance(error, BodyTooLarge)
    return TooLargeResponse(error, request.url.path)


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody is there to read it: the server drops what is sent to a closed connection."""
    assert isinstance(error, ClientDisconnect | ClientLeft)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientLeft raised, if the client leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_until_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    if working.cancelled():
        raise ClientLeft
    return working.result()


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

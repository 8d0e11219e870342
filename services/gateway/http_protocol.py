"""uvicorn's HTTP/1.1 protocol, with bounds on the head of a request, and errors in our shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import RETRY_AFTER_SECONDS, error_body
from shared.messages import Failure
from shared.rarely import Rarely

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
HEAD_SECONDS = 30.0  # for them to arrive
BODY_SECONDS = 65.0  # for a body that nobody waits for; whoever does has less patience
STALL_SECONDS = 120.0  # without the client taking anything of what waits for it: it is cut off
LINGER_SECONDS = 1.0  # see connection.TooLargeResponse


class BoundedHttpProtocol(HttpToolsProtocol):
    """`most`: more connections than these are told that there is no room, unless one is idle."""

    def __init__(
        self, *args: Any, most: int, gone: Callable[[], None], rarely: Rarely, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._most = most
        self._rarely = rarely
        self._gone = gone  # called when the connection has ended
        self._excess = False
        self._head_bytes: int | None = 0  # of the head being received; None inside a body
        self._deadline: asyncio.TimerHandle | None = None  # for what is being received
        self._stall: asyncio.TimerHandle | None = None
        self._untaken = 0  # bytes that waited for the client when it was looked at last
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._excess = len(self.connections) > self._most and not self._make_room()
        self._expect(LINGER_SECONDS if self._excess else HEAD_SECONDS)

    def _make_room(self) -> bool:
        """End a connection that is only kept alive, if there is one."""
        for one in self.connections:
            assert isinstance(one, BoundedHttpProtocol)
            if one.timeout_keep_alive_task is not None and not one.transport.is_closing():
                one.transport.close()
                return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        if self._stall is not None:
            self._stall.cancel()
        super().connection_lost(exc)
        self._gone()

    def data_received(self, data: bytes) -> None:
        if self._refused and not self._excess:
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._expect(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._expect(BODY_SECONDS)
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._excess:
            self._refuse_excess()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._expect_nothing()
        if not self._refused:
            super().on_message_complete()
        elif self._excess:
            self.transport.close()  # it has nothing more to say, so nothing is reset

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse_head(self) -> None:
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The headers are too large.")

    def _refuse_excess(self) -> None:
        self._rarely.warning("too many connections, others are refused", most=self._most)
        message = f"There are {self._most} connections already."
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, message)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer without the application, then end the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        body = json.dumps(error_body(Failure(status, message))).encode()
        again = f"retry-after: {RETRY_AFTER_SECONDS}\r\n" if self._excess else ""
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n{again}\r\n"
        )
        self.transport.write(head.encode() + body)
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    # --- what the client sends

    def _expect(self, seconds: float) -> None:
        """The next part of a request within this time, or the connection ends."""
        self._expect_nothing()
        self._deadline = self.loop.call_later(seconds, self._overdue, seconds)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _overdue(self, seconds: float) -> None:
        if self._excess:
            self._refuse_excess()
        elif self.flow.read_paused:  # it is we who keep it waiting
            self._expect(seconds)
        else:
            self.transport.close()

    # --- what the client takes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_client()

    def _watch_client(self) -> None:
        """While anything waits for it, see that it takes some of it now and then."""
        waits = self.transport.get_write_buffer_size()
        if waits and self._stall is None:
            self._untaken = waits
            self._stall = self.loop.call_later(STALL_SECONDS, self._look_at_client)

    def resume_writing(self) -> None:
        self._untaken = 0  # it has taken something, and may be given more than there was
        super().resume_writing()

    def _look_at_client(self) -> None:
        self._stall = None
        waits = self.transport.get_write_buffer_size()
        if waits and waits >= self._untaken > 0:
            self._cut()
        else:
            self._watch_client()

    def _cut(self) -> None:
        """Whoever is at its answer hears of it and tells; nobody else does if none is."""
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["headrace.too_slow"] = True
        if self.cycle is None or self.cycle.response_complete:
            request_id = scope.get("headrace.request_id")
            log = structlog.get_logger("http")
            log.info("connection cut", request_id=request_id, reason="client too slow")
        self.transport.abort()

"""The two endpoints that generate: from a body to a whole answer or a stream of events."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from services.gateway.connection import read_json, unless_client_leaves
from services.gateway.errors import ApiError, ClientLeft
from services.gateway.fields import unknown_fields
from services.gateway.flight import Flight
from services.gateway.parts import Parts
from services.gateway.protocol import GenerationBody, GenerationRequest, parse
from services.gateway.responses import DONE, FINISH_REASONS, Shape, error_event, usage_of
from shared.messages import Finished

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
LOGGED_NAMES = 10


class GenerationEndpoint:
    """An ASGI application for one route."""

    def __init__(self, parts: Parts, body: type[GenerationBody], shape: type[Shape]) -> None:
        self._parts = parts
        self._body = body
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        request_id = scope.get("headrace.request_id")
        try:
            wanted = await self._read(Request(scope, receive))
            flight = self._parts.take_off(wanted, arrived)
        except ApiError as error:
            self._refused(error, request_id)
            raise
        exchange = _Exchange(wanted, flight, self._shape(wanted), send)
        try:
            await unless_client_leaves(receive, exchange.run(scope, receive))
        except ClientLeft:
            exchange.client_left = True
        except ApiError as error:  # before the first byte
            exchange.failed = error
            self._parts.metrics.refused(error.failure.status)
            raise
        finally:
            self._parts.flights.close(flight, exchange.abort_reason)
            self._parts.log.info("request", request_id=request_id, **exchange.summary())

    def _refused(self, error: ApiError, request_id: str | None) -> None:
        failure = error.failure
        self._parts.metrics.refused(failure.status)
        self._parts.log.info(
            "request refused",
            request_id=request_id,
            status=int(failure.status),
            param=failure.param,
            code=failure.code,
        )

    async def _read(self, request: Request) -> GenerationRequest:
        parts = self._parts
        body = parse(self._body, await read_json(request, parts.settings.max_body_size))
        if unknown := unknown_fields(body.extra):
            names = [name[:50] for name in unknown[:LOGGED_NAMES]]
            parts.log.debug("unknown fields ignored", fields=names)
        name = parts.name_of(body.model)
        key = request.scope.get("headrace.key")
        return body.to_request(name, parts.model.vocab_size, parts.draw_seed, key)


class _Exchange:
    """One answer on its way to its client."""

    def __init__(
        self, request: GenerationRequest, flight: Flight, shape: Shape, send: Send
    ) -> None:
        self._request = request
        self._flight = flight
        self._collector = flight.collector
        self._shape = shape
        self._send = send
        self.failed: ApiError | None = None
        self.client_left = False
        self.complete = False

    async def run(self, scope: Scope, receive: Receive) -> None:
        """Answer; raises ApiError only before the first byte."""
        await self._collector.opened()
        if self._request.stream:
            await self._stream()
        else:
            await JSONResponse(await self._whole())(scope, receive, self._send)
            self.complete = True

    async def _whole(self) -> dict[str, Any]:
        texts = [""] * self._request.size
        while changes := await self._collector.changes():
            for change in changes:
                texts[change.index] += change.text
        choices = self._collector.choices
        finishes = [choice.finished for choice in choices if choice.finished is not None]
        return self._shape.whole(texts, finishes, usage_of(self._request, choices))

    async def _stream(self) -> None:
        shape = self._shape
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await self._write(*map(shape.opening_event, range(self._request.size)))
        try:
            while changes := await self._collector.changes():
                await self._write(
                    *(self._event(change.index, change.text, change.finished) for change in changes)
                )
        except ApiError as error:
            self.failed = error
            await self._write(error_event(error.failure), last=True)
            return
        usage = usage_of(self._request, self._collector.choices)
        events = [shape.usage_event(usage)] if self._request.include_usage else []
        await self._write(*events, DONE, last=True)
        self.complete = True

    def _event(self, index: int, text: str, finished: Finished | None) -> bytes:
        if finished is None:
            return self._shape.text_event(index, text)
        return self._shape.last_event(index, text, finished)

    async def _write(self, *events: bytes, last: bool = False) -> None:
        body = b"".join(events)
        if body or last:
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    @property
    def abort_reason(self) -> str:
        """Why whatever still runs is not wanted any more."""
        if self.client_left:
            return "client closed"
        return "client too slow" if self._collector.too_slow else "server"

    def summary(self) -> dict[str, Any]:
        """What the log says of the exchange: no text of prompts or answers."""
        now = time.perf_counter()
        arrived, first = self._flight.arrived, self._flight.first_token_at
        reasons = [one.finished.reason for one in self._collector.choices if one.finished]
        known: dict[str, Any] = {
            "id": self._shape.id,
            "status": int(self.failed.failure.status) if self.failed else 200,
            "stream": self._request.stream,
            "finish": dict(Counter(FINISH_REASONS[reason] for reason in reasons)),
            **usage_of(self._request, self._collector.choices),
            "seconds": round(now - arrived, 4),
            "first_token_seconds": None if first is None else round(first - arrived, 4),
        }
        if self.failed:
            known["error"] = self.failed.failure.message
        if not self.complete:
            known["aborted"] = self.abort_reason
        return known

"""The endpoints that generate: from a body to a whole answer or a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway.best_of import best_of
from services.gateway.body import parse
from services.gateway.collector import Change
from services.gateway.connection import read_json, unless_client_leaves
from services.gateway.dialect import DialectBody
from services.gateway.errors import ApiError, ClientLeft, error_response, noted, renamed
from services.gateway.fields import unknown_fields
from services.gateway.flight import Flight
from services.gateway.middleware import name_request
from services.gateway.parts import Parts
from services.gateway.request import GenerationRequest
from services.gateway.shape import FINISH_REASONS, Answer, Shape, StreamShape, usage_of
from services.gateway.tokens import Span, read_tokens
from shared.messages import Failure

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
KEEP_ALIVE_SECONDS = 10.0
LOGGED_NAMES = 10
MANY_PAIRS = 1000  # tokens and alternatives whose events, some milliseconds, a thread writes


class GenerationEndpoint:
    """An ASGI application for one route."""

    def __init__(self, parts: Parts, body: type[DialectBody]) -> None:
        self._parts = parts
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        if (problem := self._no_room(scope)) is not None:
            if problem.failure.status == HTTPStatus.TOO_MANY_REQUESTS:  # told of in sum
                await self._parts.refusals.turn()
                self._count(problem, scope, arrived)
            else:
                self._refused(problem, scope, arrived)
            await error_response(problem, scope["path"])(scope, receive, send)
            return
        try:
            wanted, shape = await self._read(Request(scope, receive))
            flight = self._parts.take_off(wanted, arrived)
        except ApiError as error:
            self._refused(error, scope, arrived)
            raise
        exchange = _Exchange(wanted, flight, shape, send)
        timer = self._limit(flight)
        try:
            await unless_client_leaves(receive, exchange.run(scope, receive))
        except ClientLeft:
            exchange.left = "client too slow" if "headrace.too_slow" in scope else "client closed"
        except ApiError as error:  # before the first byte
            exchange.failed = error
            self._parts.metrics.refused(error.failure.status)
            raise renamed(error, self._body.param_names) from None
        finally:
            if timer is not None:
                timer.cancel()
            self._parts.flights.close(flight, exchange.abort_reason)
            self._parts.admission.ended(wanted.size)
            summary = exchange.summary()
            if self._parts.spans is not None:
                problem = summary.get("error") or summary.get("aborted")
                self._parts.spans.ended(scope, flight, summary["status"], problem)
            self._parts.log.info("request", request_id=scope["headrace.request_id"], **summary)

    def _no_room(self, scope: Scope) -> ApiError | None:
        """Why nothing can be taken now, told without looking at the body, which is dropped.

        None if something may be, or if the body had better be seen to.
        """
        length = dict(scope["headers"]).get(b"content-length", b"")
        if not length.isdigit() or int(length) > self._parts.settings.max_body_size:
            return None
        return self._parts.no_room(1)

    def _limit(self, flight: Flight) -> asyncio.TimerHandle | None:
        """See that the request ends in time."""
        seconds = self._parts.settings.request_timeout
        if not seconds:
            return None
        message = f"The answer was not complete within {seconds:g} seconds."
        failure = Failure(HTTPStatus.GATEWAY_TIMEOUT, message, code="request_timeout")
        loop = asyncio.get_running_loop()
        return loop.call_later(seconds, flight.collector.fail, failure)

    def _count(self, error: ApiError, scope: Scope, arrived: float) -> None:
        failure = error.failure
        self._parts.metrics.refused(failure.status)
        if self._parts.spans is not None:
            self._parts.spans.refused(scope, arrived, failure.status, noted(failure))

    def _refused(self, error: ApiError, scope: Scope, arrived: float) -> None:
        failure = error.failure
        self._count(error, scope, arrived)
        self._parts.log.info(
            "request refused",
            request_id=scope["headrace.request_id"],
            status=int(failure.status),
            param=failure.param,
            code=failure.code,
        )

    async def _read(self, request: Request) -> tuple[GenerationRequest, Shape]:
        parts = self._parts
        body = parse(self._body, await read_json(request, parts.settings.max_body_size))
        if unknown := unknown_fields(body.extra):
            names = [name[:50] for name in unknown[:LOGGED_NAMES]]
            parts.log.debug("unknown fields ignored", fields=names)
        name_request(request.scope, body.request_id)
        context = parts.context(body, request.scope)
        wanted = body.to_request(context)
        return wanted, body.to_shape(wanted, context)


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
        self.left: str | None = None  # why the client is not there any more
        self.complete = False
        self._written = time.monotonic()  # when the last event was

    async def run(self, scope: Scope, receive: Receive) -> None:
        """Answer; raises ApiError only before the first byte."""
        await self._collector.opened()
        if self._request.stream:
            assert isinstance(self._shape, StreamShape)
            await self._stream(self._shape)
        else:
            await (await self._whole())(scope, receive, self._send)
            self.complete = True

    async def _whole(self) -> Response:
        texts = [""] * self._request.size
        spans: list[list[Span]] = [[] for _ in texts]
        while changes := await self._collector.changes():
            for change in changes:
                texts[change.index] += change.text
                spans[change.index] += change.spans
        if any(spans):
            return await asyncio.to_thread(self._render, texts, spans)
        return self._render(texts, spans)

    def _render(self, texts: list[str], spans: list[list[Span]]) -> Response:
        choices = self._collector.choices
        answers = [
            Answer(choice.finished, choice.prompt_tokens, text, read_tokens(told))
            for choice, text, told in zip(choices, texts, spans, strict=True)
            if choice.finished is not None
        ]
        return JSONResponse(self._shape.whole(best_of(answers, self._request), choices))

    async def _stream(self, shape: StreamShape) -> None:
        choices = self._collector.choices
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        self._written = time.monotonic()
        opening = shape.opening(choices)
        if shape.opens_early:
            await self._write(opening)
            opening = b""
        try:
            with self._keep_alive():
                while not self._collector.complete:
                    changes = await self._collector.changes()
                    events = await self._events(shape, changes)
                    await self._write(*([opening, *events] if events else [shape.keep_alive]))
                    opening = b"" if events else opening
        except ApiError as error:
            self.failed = error
            await self._write(shape.failed(error.failure), last=True)
            return
        await self._write(shape.closing(choices), last=True)
        self.complete = True

    async def _events(self, shape: StreamShape, changes: list[Change]) -> list[bytes]:
        def written() -> list[bytes]:
            return [shape.event(change, choices) for change in changes]

        choices = self._collector.choices
        pairs = sum(len(span.details.pair_ids) for change in changes for span in change.spans)
        return written() if pairs <= MANY_PAIRS else await asyncio.to_thread(written)

    @contextmanager
    def _keep_alive(self) -> Iterator[None]:
        """While it lasts, no balancer between us and the client sees a silent connection."""
        self._tick()
        try:
            yield
        finally:
            self._timer.cancel()

    def _tick(self) -> None:
        """Wake the stream if it is due, and come again when it will be."""
        due = self._written + KEEP_ALIVE_SECONDS - time.monotonic()
        if due <= 0:
            self._collector.wake()
        delay = due if due > 0 else KEEP_ALIVE_SECONDS
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    async def _write(self, *events: bytes, last: bool = False) -> None:
        body = b"".join(events)
        if body or last:
            self._written = time.monotonic()
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    @property
    def abort_reason(self) -> str:
        """Why whatever still runs is not wanted any more."""
        if self.left is not None:
            return self.left
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
            known["error"] = noted(self.failed.failure)
        if not self.complete:
            known["aborted"] = self.abort_reason
        return known

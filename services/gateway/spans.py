"""OpenTelemetry: a span for each request, with its phases below it, for whoever collects them.

Spans are made when a request has ended, of the times that were noted anyway; a thread of
OpenTelemetry's sends them. Imported only where `--otlp-traces-endpoint` is set.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from services.gateway.flight import Flight
from services.gateway.shape import FINISH_REASONS, usage_of

FLUSH_SECONDS = 2.0  # that the end waits for what was not sent yet


class RequestSpans:
    def __init__(self, endpoint: str, instance: str) -> None:
        """Send to this URL of a collector, as OTLP over HTTP, in the name of this instance."""
        name = os.environ.get("OTEL_SERVICE_NAME", "headrace")
        resource = Resource.create({"service.name": name, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headrace")
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, scope: Scope, flight: Flight, status: int, problem: str | None) -> None:
        """A request that was taken in has ended now; `problem` is why it did not end well."""
        now = time.perf_counter()
        times = _Times(flight, now)
        attributes = {**_wishes(flight), **_outcome(flight), **times.latencies()}
        span = _Span(flight.arrived, now, status, problem, attributes, times.phases())
        self._record(scope, span)

    def refused(self, scope: Scope, arrived: float, status: int, problem: str) -> None:
        """A request was not taken in; `arrived` by perf_counter, in seconds."""
        self._record(scope, _Span(arrived, time.perf_counter(), status, problem))

    async def close(self) -> None:
        """Send what is left, if the collector takes it in time."""
        closing = asyncio.to_thread(self._provider.shutdown)
        await asyncio.wait([asyncio.ensure_future(closing)], timeout=FLUSH_SECONDS)

    def _record(self, scope: Scope, span: _Span) -> None:
        epoch = time.time_ns() - time.perf_counter_ns()

        def clock(seconds: float) -> int:
            return epoch + round(seconds * 1e9)

        sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        told = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(sent),
            SpanKind.SERVER,
            {
                "url.path": scope["path"],
                "http.response.status_code": span.status,
                "gen_ai.request.id": scope["headrace.request_id"],
                **span.attributes,
            },
            start_time=clock(span.began),
        )
        if span.problem is not None:
            told.set_status(Status(StatusCode.ERROR, span.problem))
        context = set_span_in_context(told)
        for name, (began, ended) in span.phases.items():
            self._tracer.start_span(name, context, start_time=clock(began)).end(clock(ended))
        told.end(clock(span.ended))


@dataclass(frozen=True, slots=True)
class _Span:
    """Times are perf_counter's, in seconds."""

    began: float
    ended: float
    status: int  # of HTTP
    problem: str | None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    phases: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class _Times:
    """When a request's first sequences got how far; perf_counter, seconds.

    Messages of several services tell of them, and some may overtake others.
    """

    def __init__(self, flight: Flight, now: float) -> None:
        self._now = now
        self.arrived = flight.arrived
        self.first = flight.first_token_at
        self.admitted = _not_after(self.first, flight.admitted_at)
        self.accepted = _not_after(self.admitted or self.first, flight.accepted_at)
        self.last = max(one.last_token_at for one in flight.sequences) if self.first else None

    def phases(self) -> dict[str, tuple[float, float]]:
        """Those of which both ends are known."""
        names = ("tokenize", "queue", "prefill", "decode")
        ends = (self.arrived, self.accepted, self.admitted, self.first, self.last)
        spans = zip(names, pairwise(ends), strict=True)
        return {
            name: (start, end)
            for name, (start, end) in spans
            if start is not None and end is not None
        }

    def latencies(self) -> dict[str, float]:
        """In seconds, by vLLM's names."""
        known = {"gen_ai.latency.e2e": self._now - self.arrived}
        if self.first is not None:
            known["gen_ai.latency.time_to_first_token"] = self.first - self.arrived
        names = {
            "queue": "gen_ai.latency.time_in_queue",
            "prefill": "gen_ai.latency.time_in_model_prefill",
            "decode": "gen_ai.latency.time_in_model_decode",
        }
        phases = self.phases()
        return known | {
            names[phase]: end - start for phase, (start, end) in phases.items() if phase in names
        }


def _not_after(limit: float | None, seconds: float | None) -> float | None:
    return seconds if limit is None or seconds is None else min(seconds, limit)


def _wishes(flight: Flight) -> dict[str, Any]:
    request, params = flight.request, flight.request.params
    wishes = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.n": request.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    return {name: value for name, value in wishes.items() if value is not None}


def _outcome(flight: Flight) -> dict[str, Any]:
    choices = flight.collector.choices
    usage = usage_of(flight.request, choices)
    reasons = [one.finished.reason for one in choices if one.finished is not None]
    return {
        "gen_ai.usage.num_sequences": len(choices),
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": [FINISH_REASONS[reason] for reason in reasons],
    }

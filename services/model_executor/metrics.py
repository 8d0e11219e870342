"""The executor's counters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.model_executor.occupancy import Occupancy
from services.model_executor.results import StepOutput

# Seconds
ITERATION_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.5, 1.0, 2.5),
)


class ExecutorMetrics(Collector):
    """What was computed, and where the time went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._occupancy = Occupancy(since=time.monotonic())
        self._iterations = Counter("headrace_iterations", "Plans that were run", registry=registry)
        tokens = Counter(
            "headrace_iteration_tokens", "Tokens computed", ["kind"], registry=registry
        )
        self._prefill, self._decode = tokens.labels("prefill"), tokens.labels("decode")
        self._seconds = Histogram(
            "headrace_iteration_seconds",
            "What an iteration took",
            buckets=ITERATION_BUCKETS,
            registry=registry,
        )
        self.misfits = Counter(
            "headrace_executor_misfits", "Plans that did not fit the batch", registry=registry
        )
        registry.register(self)

    def computed(self, output: StepOutput) -> None:
        self._iterations.inc()
        self._seconds.observe(output.span.ended - output.span.began)
        self._prefill.inc(output.prefill_tokens)
        self._decode.inc(output.decode_tokens)
        self._occupancy.computed(output.span, output.num_running)

    def emptied(self) -> None:
        """The batch's sequences were dropped."""
        self._occupancy.emptied(time.monotonic())

    @property
    def seconds(self) -> Mapping[str, float]:
        """Where they went."""
        occupancy = self._occupancy
        occupancy.idle_until(time.monotonic())
        return {
            "busy_seconds": occupancy.busy,
            "bubble_seconds": occupancy.bubble,
            "idle_seconds": occupancy.idle,
        }

    def collect(self) -> Iterable[Metric]:
        occupancy = self._occupancy
        occupancy.idle_until(time.monotonic())
        totals = {
            "busy": ("Time spent computing", occupancy.busy),
            "bubble": ("Time with sequences in the batch but none computed", occupancy.bubble),
            "idle": ("Time without sequences in the batch", occupancy.idle),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"headrace_executor_{name}_seconds", text, value=value)

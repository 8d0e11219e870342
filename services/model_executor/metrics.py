"""The executor's counters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from services.model_executor.results import StepOutput


class ExecutorMetrics:
    """What was computed, and in how much time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._iterations = Counter("headrace_iterations", "Plans that were run", registry=registry)
        self._tokens = Counter(
            "headrace_iteration_tokens", "Tokens computed", ["kind"], registry=registry
        )
        self._busy = Counter(
            "headrace_executor_busy_seconds", "Time spent computing", registry=registry
        )
        self.misfits = Counter(
            "headrace_executor_misfits", "Plans that did not fit the batch", registry=registry
        )

    def computed(self, output: StepOutput, seconds: float) -> None:
        self._iterations.inc()
        self._tokens.labels("prefill").inc(output.prefill_tokens)
        self._tokens.labels("decode").inc(output.decode_tokens)
        self._busy.inc(seconds)

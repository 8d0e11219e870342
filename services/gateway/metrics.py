"""The gateway's own metrics: named as vLLM's, with our prefix; all there from the first scrape."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.metrics import recoveries_counter
from shared.types import FinishReason

# Seconds. The bounds are vLLM's, so that its dashboards fit.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
REFUSALS = ("400", "404", "429", "503")


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "headrace_inter_token_latency_seconds",
            "Between two tokens of a sequence",
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self.latency = Histogram(
            "headrace_e2e_request_latency_seconds",
            "From a request's arrival to the end of a sequence",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._ended = Counter(
            "headrace_request_success",
            "Sequences that ended, by reason",
            ["finished_reason"],
            registry=registry,
        )
        for reason in FinishReason:
            if reason is not FinishReason.NONE:
                self._ended.labels(reason.name.lower())
        self._refused = Counter(
            "headrace_request_refused",
            "HTTP requests for generation that were refused, by status",
            ["status"],
            registry=registry,
        )
        for status in REFUSALS:
            self._refused.labels(status)
        self.recoveries = recoveries_counter(registry)
        self.late = Counter(
            "headrace_gateway_late_messages",
            "Messages about requests that had ended",
            registry=registry,
        )
        self.unanswered_scrapes = Counter(
            "headrace_gateway_unanswered_scrapes",
            "Services that did not send their metrics in time",
            registry=registry,
        )

    def ended(self, reason: FinishReason) -> None:
        self._ended.labels(reason.name.lower()).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

"""What the detokenizer tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.detokenizer.core import DetokenizerCore


class DetokenizerCollector(Collector):
    """Reads the core when asked, so that counting costs the loop nothing."""

    def __init__(self, core: DetokenizerCore) -> None:
        self._core = core

    def collect(self) -> Iterable[Metric]:
        counters = self._core.counters
        totals = {
            "tokens": ("Tokens turned into text", counters.tokens),
            "late_tokens": ("Tokens of requests that had ended", counters.late_tokens),
            "repeated_tokens": ("Tokens that were known already", counters.repeated_tokens),
            "dropped_early_tokens": (
                "Tokens whose request was not opened in time",
                counters.dropped_early_tokens,
            ),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"headrace_detokenizer_{name}", text, value=value)
        yield GaugeMetricFamily(
            "headrace_detokenizer_requests", "Requests that are open", value=self._core.num_open
        )

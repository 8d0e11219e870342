"""What the scheduler tells Prometheus; names as vLLM's where the same is meant."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.scheduler.core import SchedulerCore

QUEUE_TIME_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class SchedulerCollector(Collector):
    """Reads the core when asked, so that counting costs the loop nothing."""

    def __init__(self, core: SchedulerCore, scheduler: str) -> None:
        """`scheduler` is its name in the mesh."""
        self._core = core
        self._scheduler = scheduler

    def collect(self) -> Iterable[Metric]:
        core, counters, fleet = self._core, self._core.counters, self._core.fleet
        cache = fleet.cache_stats
        gauges = {
            "num_requests_running": ("Requests in the batch", fleet.num_running),
            "num_requests_waiting": ("Requests that wait for a place", len(core.waiting)),
            "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", fleet.cache_usage),
        }
        totals = {
            "prompt_tokens": ("Prompt tokens computed", counters.prompt_tokens),
            "generation_tokens": ("Tokens generated", counters.generation_tokens),
            "num_preemptions": ("Requests put back to be recomputed", counters.preemptions),
            "leases": ("Plans that let the executor go on by itself", counters.leases),
            "prefix_cache_queries": ("Prompt tokens looked up in the cache", cache.queries),
            "prefix_cache_hits": ("Prompt tokens found there", cache.hits),
            "prefix_cache_evictions": ("Cached KV blocks given to others", cache.evictions),
            "late_tokens": ("Tokens of requests that had ended", counters.late_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"headrace_{name}", text, value=value)
        yield from self._executors()
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"headrace_{name}", text, value=value)

    def _executors(self) -> Iterable[Metric]:
        executors = GaugeMetricFamily(
            "headrace_executors", "Executors of each scheduler", labels=["scheduler"]
        )
        executors.add_metric([self._scheduler], len(self._core.fleet))
        running = GaugeMetricFamily(
            "headrace_executor_requests_running", "Those on each executor", labels=["executor"]
        )
        for engine in self._core.fleet.engines:
            running.add_metric([engine.name], len(engine.running))
        return executors, running


def queue_time_histogram(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "headrace_request_queue_time_seconds",
        "From arrival at the scheduler to the first plan",
        registry=registry,
        buckets=QUEUE_TIME_BUCKETS,
    )

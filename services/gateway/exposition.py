"""Many expositions into one: what every instance counted, summed."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SHARE_SUFFIX = "_perc"  # a share of something: instances are averaged, not added up
CREATED_SUFFIX = "_created"  # times of creation, which have no sum


class _Family(Collector):
    """One metric of all instances."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}

    def add(self, metric: Metric) -> None:
        for sample in metric.samples:
            key = (sample.name, tuple(sample.labels.items()))
            self._values.setdefault(key, []).append(sample.value)

    def collect(self) -> Iterable[Metric]:
        merge = fmean if self._metric.name.endswith(SHARE_SUFFIX) else sum
        merged = Metric(self._metric.name, self._metric.documentation, self._metric.type)
        for (name, labels), values in self._values.items():
            merged.add_sample(name, dict(labels), merge(values))
        return [merged]


class _Merged(Collector):
    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def add(self, exposition: str) -> None:
        for metric in list(text_string_to_metric_families(exposition)):
            if not metric.name.endswith(CREATED_SUFFIX):
                self._families.setdefault(metric.name, _Family(metric)).add(metric)

    def collect(self) -> Iterable[Metric]:
        return [metric for family in self._families.values() for metric in family.collect()]


def merge(expositions: Iterable[str]) -> bytes:
    """Prometheus text of the sums; raises ValueError for what is no exposition."""
    merged = _Merged()
    for text in expositions:
        merged.add(text)
    return generate_latest(merged)

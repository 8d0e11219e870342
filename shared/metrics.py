"""What every process says of itself, labelled so that sums over the mesh keep them apart."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.codec import Identity

# In memory, even where the environment has a PROMETHEUS_MULTIPROC_DIR for other programs: each
# process answers for itself, and files could fail it.
values.ValueClass = values.MutexValue

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessCollector(Collector):
    """CPU seconds, resident memory and open file descriptors of this process."""

    def __init__(self, identity: Identity) -> None:
        self._labels = [identity.service.value, identity.name]

    def collect(self) -> Iterable[Metric]:
        names = ["service", "instance"]
        cpu = CounterMetricFamily(
            "headrace_process_cpu_seconds", "CPU time of the process", labels=names
        )
        cpu.add_metric(self._labels, time.process_time())
        memory = GaugeMetricFamily(
            "headrace_process_resident_memory_bytes", "Resident memory", labels=names
        )
        memory.add_metric(self._labels, _resident_bytes())
        files = GaugeMetricFamily(
            "headrace_process_open_fds", "Open file descriptors", labels=names
        )
        files.add_metric(self._labels, len(os.listdir("/proc/self/fd")))
        return [cpu, memory, files]


def exposition(registry: CollectorRegistry) -> str:
    """The registry in Prometheus text format."""
    return generate_latest(registry).decode()


def total(counter: Counter) -> float:
    """Of all its labels."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES


def recoveries_counter(registry: CollectorRegistry) -> Counter:
    """By the service that was lost; whoever takes care of its requests counts."""
    return Counter(
        "headrace_recoveries_total",
        "Losses of an instance whose requests went on elsewhere",
        ["service"],
        registry=registry,
    )

"""Metrics of many instances become one page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.exposition import merge
from shared.metrics import exposition


def instance(counts: dict[str, int], seconds: list[float], running: int, share: float) -> str:
    registry = CollectorRegistry()
    counter = Counter("x_done", "Done", ["kind"], registry=registry)
    for kind, count in counts.items():
        counter.labels(kind).inc(count)
    histogram = Histogram("x_seconds", "Took", buckets=(0.1, 1.0), registry=registry)
    for value in seconds:
        histogram.observe(value)
    Gauge("x_running", "Running", registry=registry).set(running)
    Gauge("x_usage_perc", "Used", registry=registry).set(share)
    return exposition(registry)


def samples(page: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(["a", 'b"\\\n', "\u00fc"]), st.integers(0, 9)),
            st.lists(st.sampled_from([0.05, 0.5, 5.0]), max_size=4),
            st.integers(0, 9),
            st.sampled_from([0.0, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_sums(parts: list[tuple[dict[str, int], list[float], int, float]]) -> None:
    found = samples(merge(instance(*part) for part in parts))
    for kind in {kind for counts, *_ in parts for kind in counts}:
        total = sum(counts.get(kind, 0) for counts, *_ in parts)
        assert found[f"x_done_total {kind}"] == total
    seconds = [value for _, values, *_ in parts for value in values]
    for bound in (0.1, 1.0):
        assert found[f"x_seconds_bucket {bound}"] == sum(value <= bound for value in seconds)
    assert found["x_seconds_bucket +Inf"] == found["x_seconds_count"] == len(seconds)
    assert found["x_seconds_sum"] == pytest.approx(sum(seconds))
    assert found["x_running"] == sum(running for *_, running, _ in parts)
    assert found["x_usage_perc"] == pytest.approx(sum(part[3] for part in parts) / len(parts))


def test_types_and_helps_stay_and_times_of_creation_go() -> None:
    one = instance({"a": 1}, [0.5], 2, 0.25)
    page = merge([one, one]).decode()
    for line in (
        "# HELP x_done_total Done",
        "# TYPE x_done_total counter",
        "# TYPE x_seconds histogram",
        "# TYPE x_running gauge",
        'x_done_total{kind="a"} 2.0',
        'x_seconds_bucket{le="1.0"} 2.0',
        "x_usage_perc 0.25",
    ):
        assert line in page.splitlines()
    assert "created" in one
    assert "created" not in page
    assert page.count("# TYPE x_running") == 1


def test_what_is_no_exposition() -> None:
    with pytest.raises(ValueError):
        merge(["x_done_total{ 5"])

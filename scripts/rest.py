"""A mesh at rest: what must be back to nothing when nobody asks for anything."""

from __future__ import annotations

import asyncio
import time

from serving import Metrics

SETTLE_SECONDS = 10  # until all that was left must be gone
GAUGES = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("detokenizer_requests", "tokenizer_waiting"),
]
FAULTS = ["executor_misfits_total", "mesh_bad_frames_total", "mesh_undelivered_total"]


async def settled(url: str) -> Metrics:
    """The metrics once all gauges are at rest, or when they had time enough."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = await Metrics.of(url)
        if not any(map(metrics.total, GAUGES)) or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(0.1)


def left_behind(metrics: Metrics) -> list[str]:
    """What should be nothing, and is not."""
    names = GAUGES + FAULTS
    return [f"{name} is {value:g}" for name in names if (value := metrics.total(name))]

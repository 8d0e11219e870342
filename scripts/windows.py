"""What a server did over a stretch of time under load: its own counters, and what clients saw."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from serving import Metrics, machine_cpu_seconds
from streams import StreamError, StreamRecord, held_streams, stream

BURST = 64  # requests
BURST_TOKENS = 8
BURST_SECONDS = 1.0  # from one burst to the next
SETTLE_SECONDS = 1.0  # after the last stream's first token


@dataclass(frozen=True, slots=True)
class Window:
    """What was measured; times in seconds."""

    began: float
    ended: float
    before: Metrics
    after: Metrics
    steady: list[StreamRecord]
    arrived: list[StreamRecord]  # in bursts; from their beginning to their end
    machine_cpu: float  # CPU seconds of all processes but the client

    def delta(self, name: str, **labels: str) -> float:
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    @property
    def busy(self) -> float:
        return self.delta("executor_busy_seconds_total")

    @property
    def seconds(self) -> float:
        """From one reading of the counters to the other, as the executor accounts for it."""
        lost = [self.delta(f"executor_{kind}_seconds_total") for kind in ("bubble", "idle")]
        return self.busy + sum(lost)

    @property
    def bubble(self) -> float:
        """Share of the time without computation: there was always work in the system."""
        return 1.0 - self.busy / self.seconds

    @property
    def iteration(self) -> float:
        """Seconds of an iteration."""
        return self.busy / self.delta("iterations_total")

    @property
    def tokens_per_second(self) -> float:
        """Of the steady streams."""
        own = self.delta("generation_tokens_total") - len(self.arrived) * BURST_TOKENS
        return own / self.seconds

    def others(self, in_one_process: bool) -> float:
        """Share of the machine that processes took which have nothing to do with it."""
        labels = {"service": "gateway"} if in_one_process else {}
        own = self.delta("process_cpu_seconds_total", **labels)
        return (self.machine_cpu - own) / self.seconds / (os.cpu_count() or 1)

    def _within(self, record: StreamRecord) -> list[float]:
        return [arrival for arrival in record.arrivals if self.began <= arrival <= self.ended]

    @property
    def per_token(self) -> list[float]:
        """The mean of each steady stream."""
        arrivals = [self._within(record) for record in self.steady]
        return [(one[-1] - one[0]) / (len(one) - 1) for one in arrivals if len(one) > 1]

    @property
    def gaps(self) -> list[float]:
        """From each token of a steady stream to the next."""
        arrivals = [self._within(record) for record in self.steady]
        return [b - a for one in arrivals for a, b in pairwise(one)]

    @property
    def first_token(self) -> list[float]:
        """Of those that arrived in bursts, else of the steady streams, which came all at once."""
        return [record.first for record in self.arrived or self.steady]


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def measure(url: str, streams: int, tokens: int, seconds: float, bursts: bool) -> Window:
    """`tokens` are more than each of the streams gets in the time."""
    url_of_streams = f"{url}/v1/completions"
    bodies = [body(f"Stream {number} tells a story about", tokens) for number in range(streams)]
    async with held_streams(url_of_streams, bodies) as steady:
        await asyncio.sleep(SETTLE_SECONDS)
        before, began = await Metrics.of(url), time.perf_counter()
        cpu = machine_cpu_seconds() - time.process_time()
        if bursts:
            arrived = await burst_for(seconds, url_of_streams)
        else:
            arrived = await asyncio.sleep(seconds, [])
        after, ended = await Metrics.of(url), time.perf_counter()
        cpu = machine_cpu_seconds() - time.process_time() - cpu
    return Window(began, ended, before, after, steady, arrived, cpu)


async def burst_for(seconds: float, url: str) -> list[StreamRecord]:
    """Requests in bursts; returns when all have ended."""
    tasks = []
    for number in range(int(seconds / BURST_SECONDS)):
        prompt = f"Burst {number} is a short prompt that comes with many others"
        tasks += [
            asyncio.create_task(stream(url, body(prompt, BURST_TOKENS))) for _ in range(BURST)
        ]
        await asyncio.sleep(BURST_SECONDS)
    records = await asyncio.gather(*tasks)
    if short := [record for record in records if len(record.arrivals) != BURST_TOKENS]:
        raise StreamError(f"{len(short)} short streams: status {short[0].status}")
    return records

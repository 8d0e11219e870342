"""One mesh under a fixed load, and what its instances took meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace

from serving import Metrics, Server, machine_cpu_seconds
from streams import StreamError, StreamRecord, held_streams, stream
from windows import body

from shared.types import ServiceName

SETTLE_SECONDS = 1.0  # after the last stream's first token
PROMPT = "The mill stands where the river bends, and its wheel turns by night and by day. " * 20
MOST_TOKENS = 8000  # of a stream: more does not fit into the context


@dataclass(frozen=True, slots=True)
class Load:
    """Steady streams, and prompts that come beside them, each for one token."""

    streams: int
    prompts: float  # a second
    iteration: float  # seconds of the simulated accelerator
    seconds: float  # of a measurement

    def times(self, factor: int) -> Load:
        return replace(self, streams=factor * self.streams, prompts=factor * self.prompts)

    @property
    def flags(self) -> list[str]:
        return [
            *("--device", "simulated", "--sim", f"base={self.iteration}"),
            *("--max-num-seqs", str(self.streams + 64)),
            *("--max-num-batched-tokens", "4096", "--log-level", "warning"),
            *("--max-decode-slowdown", "inf"),
        ]

    def __str__(self) -> str:
        return f"{self.streams} streams at {1000 * self.iteration:g} ms, {self.prompts:g} prompts/s"


@dataclass(frozen=True, slots=True)
class Turn:
    """What was measured once."""

    cpu: dict[ServiceName, list[float]]  # seconds of each instance
    tokens: float  # that were generated
    events: int  # that told clients of them: fewer, where a gateway lags and merges tokens
    prompt_tokens: float
    seconds: float
    others: float  # share of the machine that other processes took

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_event(self) -> float:
        return self.tokens / self.events

    def cost(self, service: ServiceName) -> float:
        """CPU seconds of a service's instances together, for each piece of its work."""
        work = {ServiceName.GATEWAY: self.events, ServiceName.TOKENIZER: self.prompt_tokens}
        return sum(self.cpu[service]) / work.get(service, self.tokens)


async def turn(server: Server, load: Load) -> Turn:
    endpoint = f"{server.url}/v1/completions"
    bodies = [body(f"Stream {number} tells of", MOST_TOKENS) for number in range(load.streams)]
    async with held_streams(endpoint, bodies) as streams:
        await asyncio.sleep(SETTLE_SECONDS)
        counted, cpu = await Metrics.of(server.url), server.cpu_seconds()
        events = sum(len(one.events) for one in streams)
        began, machine = time.perf_counter(), machine_cpu_seconds() - time.process_time()
        arrived = await arrive(endpoint, load)
        seconds = time.perf_counter() - began
        machine = machine_cpu_seconds() - time.process_time() - machine
        after = server.cpu_seconds()
        events = sum(len(one.events) for one in [*streams, *arrived]) - events
        counts = await Metrics.of(server.url)
    spent = {
        service: [end - start for end, start in zip(after[service], cpu[service], strict=True)]
        for service in after
    }
    own = sum(sum(each) for each in spent.values())

    def delta(name: str) -> float:
        return counts.total(name) - counted.total(name)

    return Turn(
        spent,
        delta("generation_tokens_total"),
        events,
        delta("prompt_tokens_total"),
        seconds,
        (machine - own) / seconds / (os.cpu_count() or 1),
    )


async def arrive(url: str, load: Load) -> list[StreamRecord]:
    """Prompts at their rate; returns when all are answered."""
    began = time.perf_counter()
    tasks: list[asyncio.Task[StreamRecord]] = []
    for number in range(int(load.seconds * load.prompts)):
        await asyncio.sleep(max(0.0, began + number / load.prompts - time.perf_counter()))
        request = stream(url, body(f"{number}: {PROMPT}", 1))
        tasks.append(asyncio.create_task(request))
    records = await asyncio.gather(*tasks)
    if failed := [record for record in records if not record.done]:
        raise StreamError(f"{len(failed)} prompts failed with status {failed[0].status}")
    return records

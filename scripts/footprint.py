"""What the processes of a mesh hold on to: anonymous memory and open handles, sampled over time."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.5
MIB_KIB = 1024


def mesh_processes() -> dict[str, int]:
    """The processes of a mesh that is our child, by title: their ids."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            title = " ".join(process.cmdline()).strip()
            if title.startswith("headrace:"):
                found[title.removeprefix("headrace: ")] = process.pid
    return found


def anonymous_mib(pid: int) -> float:
    """Memory that no file backs; files mapped by libraries come and go as the system likes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / MIB_KIB if found else 0.0


def handles(pid: int) -> int:
    """Open file descriptors."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def cpu_seconds(pid: int) -> float:
    user, system = psutil.Process(pid).cpu_times()[:2]
    return float(user + system)


@dataclass
class Footprint:
    """Of one mesh: `async with` samples it until the block ends."""

    processes: dict[str, int] = field(default_factory=mesh_processes)
    times: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)  # MiB, by title

    async def __aenter__(self) -> Footprint:
        self.memory = {title: [] for title in self.processes}
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._sampling.cancel()
        await asyncio.gather(self._sampling, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            self.times.append(time.monotonic())
            for title, pid in self.processes.items():
                self.memory[title].append(anonymous_mib(pid))
            await asyncio.sleep(SAMPLE_SECONDS)

    def growth(self, title: str) -> float:
        """MiB that a straight line through the last half of the samples rises over that half."""
        half = len(self.times) // 2
        times, sizes = self.times[half:], self.memory[title][half:]
        middle, mean = sum(times) / len(times), sum(sizes) / len(sizes)
        spread = sum((at - middle) ** 2 for at in times)
        if not spread:
            return 0.0
        pairs = zip(times, sizes, strict=True)
        slope = sum((at - middle) * (size - mean) for at, size in pairs) / spread
        return slope * (times[-1] - times[0])

"""`headrace serve` as a child process of a benchmark, and its metrics."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from shared.types import ServiceName

ROOT = Path(__file__).parents[1]
READY_SECONDS = 120
SERVE = ("-m", "services.launcher", "serve")


class ServeFailed(Exception):
    """The server did not start; the text is the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    launcher: psutil.Process

    def cpu_seconds(self) -> dict[ServiceName, list[float]]:
        """CPU time of each service's instances, in the order of their numbers."""
        found: dict[ServiceName, dict[int, float]] = {}
        for child in self.launcher.children():
            service, index = child.cmdline()[0].removeprefix("headrace: ").split()
            # The kernel's own clock of the process: psutil counts in hundredths of a second.
            clock = time.clock_gettime(~child.pid << 3 | 2)
            found.setdefault(ServiceName(service), {})[int(index)] = clock
        return {name: [of[number] for number in sorted(of)] for name, of in found.items()}


@contextmanager
def serving(*words: str, program: Sequence[str] = SERVE) -> Iterator[str]:
    """Serve on a free port with these arguments; yields the base URL. Raises ServeFailed.

    program: what Python runs instead of `headrace serve`.
    """
    with started(*words, program=program) as server:
        yield server.url


@contextmanager
def started(*words: str, program: Sequence[str] = SERVE) -> Iterator[Server]:
    """The same, with what its processes take."""
    command = [sys.executable, "-P", *program, *words, "--port", "0"]
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(command, stderr=log, cwd=ROOT, start_new_session=True)
        try:
            yield Server(_wait_ready(process, log.fileno()), psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: int) -> str:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        text = os.pread(log, 1 << 20, 0).decode(errors="replace")
        if found := re.search(r"ready after .* at (\S+)/v1", text):
            return found[1]
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServeFailed(text[-2000:].strip())
        time.sleep(0.1)


class Metrics:
    """One scrape of a mesh."""

    def __init__(self, exposition: str) -> None:
        self._samples = [
            sample
            for family in text_string_to_metric_families(exposition)
            for sample in family.samples
        ]

    @classmethod
    async def of(cls, url: str) -> Metrics:
        """Ask until every service has answered: on a busy machine one may be too late."""
        while True:
            metrics = cls(await asyncio.to_thread(_get, f"{url}/metrics"))
            if metrics._services >= set(ServiceName):
                return metrics

    @property
    def _services(self) -> set[str]:
        name = "headrace_process_cpu_seconds_total"
        return {sample.labels["service"] for sample in self._samples if sample.name == name}

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that bear these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == f"headrace_{name}" and labels.items() <= sample.labels.items()
        )


def machine_cpu_seconds() -> float:
    """CPU time of all processes of the machine, from a beginning of no meaning.

    All time but that of idle cores: the system samples the times of processes far more coarsely.
    """
    cores = os.cpu_count() or 1
    idle, waiting = map(int, Path("/proc/stat").read_text().split()[4:6])
    return cores * time.monotonic() - (idle + waiting) / os.sysconf("SC_CLK_TCK")


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        text: str = response.read().decode()
        return text

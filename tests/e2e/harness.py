"""A whole mesh as its users start it, for tests to talk to over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

MODEL = "smol"  # the name under which tests serve whatever they serve
READY_SECONDS = 90
IDLE_SECONDS = 5
GAUGES = {
    f"headrace_{name}"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
}


class RunningMesh:
    """`headrace serve` as a child process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str) -> None:
        self.process = process
        self.log = log
        self.runtime = log.parent / "run"  # where run directories are made
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": MODEL, **body})

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """The answer of /v1/completions, greedy unless told otherwise."""
        body = {"prompt": prompt, "temperature": 0, **options}
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def text(self, prompt: Any, **options: Any) -> str:
        text: str = self.complete(prompt, **options)["choices"][0]["text"]
        return text

    def another_client(self) -> httpx.Client:
        """A client with connections of its own."""
        return httpx.Client(base_url=self.url, timeout=120)

    def metric(self, name: str, *, client: httpx.Client | None = None, **labels: str) -> float:
        """The sum of a metric's samples that bear these labels."""
        return sum(
            sample.value
            for sample in self._samples(client or self.client)
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _samples(self, client: httpx.Client) -> list[Sample]:
        families = text_string_to_metric_families(client.get("/metrics").text)
        return [sample for family in families for sample in family.samples]

    def wait_idle(self) -> None:
        """All gauges back to rest; fails if they are not within a few seconds."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            gauges = [one for one in self._samples(self.client) if one.name in GAUGES]
            if len(gauges) >= len(GAUGES) and not any(one.value for one in gauges):
                return
            assert time.monotonic() < deadline, gauges
            time.sleep(0.05)

    def child(self, title: str) -> psutil.Process:
        """The process whose title ends with e.g. `scheduler 0`."""
        for process in psutil.Process(self.process.pid).children():
            with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
                if " ".join(process.cmdline()).strip() == f"headrace: {title}":
                    return process
        raise AssertionError(f"no process {title}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to the launcher and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def running_mesh(
    model: Path, *flags: str, within: Sequence[str] = (), **environment: str
) -> Iterator[RunningMesh]:
    """Start a mesh, wait until it is ready, and take it down at the end.

    `within`: a command that starts the command after it.
    """
    with tempfile.TemporaryDirectory(prefix="hr-test-", dir="/tmp") as scratch:
        log = Path(scratch) / "log"
        runtime = Path(scratch) / "run"
        runtime.mkdir()
        words = ["serve", str(model), "--port", "0", "--served-model-name", MODEL, *flags]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*within, sys.executable, "-P", "-m", "services.launcher", *words],
                stderr=stream,
                env=os.environ | {"XDG_RUNTIME_DIR": str(runtime)} | environment,
            )
        try:
            mesh = RunningMesh(process, log, _wait_ready(process, log))
            with mesh.client:
                yield mesh
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        assert not list(runtime.iterdir()), "the run directory was left behind"


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the launcher prints once the mesh answers."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if found := re.search(r"ready after .* at (\S+)/v1", log.read_text()):
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the mesh did not get ready:\n{log.read_text()[-4000:]}")

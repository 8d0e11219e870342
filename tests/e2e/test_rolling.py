"""Instances join and leave while streams run: no request fails, and every text is the right one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.launcher.cli import run
from tests.e2e.harness import MODEL, READY_SECONDS, RunningMesh, running_mesh

SIM = ("--device", "simulated", "--sim", "base=0.005", "--num-gpu-blocks-override", "500")
PROMPTS = ["The mill", "A river that", "Once upon a time", "Water is"]
SERVICES = ("detokenizer", "tokenizer", "scheduler", "model-executor", "gateway")
INDEX = 7  # of those who join


class Load:
    """Streams at all times, each over a connection of its own, from the mesh's gateways in turn."""

    def __init__(self, mesh: RunningMesh) -> None:
        self.urls = [mesh.url]
        self.faults: list[str] = []
        self._expected = [mesh.text(prompt, max_tokens=60) for prompt in PROMPTS]
        self._done = [0] * len(PROMPTS)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(len(PROMPTS))
        ]

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(timeout=READY_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads)

    def goes_on(self) -> None:
        """Wait until everybody has had two more answers."""
        before = list(self._done)
        deadline = time.monotonic() + READY_SECONDS
        while not all(now >= was + 2 for now, was in zip(self._done, before, strict=True)):
            assert not self.faults, self.faults
            assert time.monotonic() < deadline, (before, self._done)
            time.sleep(0.05)

    def _ask(self, number: int) -> None:
        body = {"model": MODEL, "prompt": PROMPTS[number], "max_tokens": 60, "temperature": 0}
        while not self._over.is_set():
            url = self.urls[self._done[number] % len(self.urls)]
            try:
                text = streamed(url, body | {"stream": True})
            except (httpx.HTTPError, AssertionError) as error:
                self.faults.append(f"{number} at {url}: {error!r}")
                return
            if text != self._expected[number]:
                self.faults.append(f"{number} at {url}: {text!r}")
            self._done[number] += 1


def streamed(url: str, body: dict[str, Any]) -> str:
    pieces = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                pieces += [choice["text"] for choice in event["choices"]]
    return "".join(pieces)


@dataclass
class Joined:
    """Processes that were started by hand."""

    mesh: RunningMesh
    model: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    gateway_url: str = ""

    def start(self, service: str, *flags: str) -> None:
        (directory,) = self.mesh.runtime.iterdir()
        own = ["--mesh", f"ipc:{directory}", "--index", str(INDEX), *flags]
        if service != "scheduler":  # which needs to know nothing of the model
            own += ["--model", str(self.model)]
        words = [sys.executable, "-P", "-m", "services.launcher", service, *own]
        with self._log(service).open("wb") as log:
            self.processes[service] = subprocess.Popen(words, stderr=log)
        wait_state(self.mesh, f"{service}.{INDEX}", "ready")

    def start_gateway(self) -> str:
        """Returns its address."""
        self.start("gateway", "--port", "0", "--served-model-name", MODEL)
        deadline = time.monotonic() + READY_SECONDS
        while not (found := re.search(r"http://[\d.]+:\d+", self._log("gateway").read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        url = found[0]
        while httpx.get(f"{url}/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return url

    def leave(self, service: str) -> None:
        process = self.processes.pop(service)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=READY_SECONDS) == 0, self._log(service).read_text()

    def kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _log(self, service: str) -> Path:
        return self.mesh.log.parent / f"{service}.{INDEX}.log"


def instances(mesh: RunningMesh) -> dict[str, dict[str, Any]]:
    with mesh.another_client() as client:
        return {one["name"]: one for one in client.get("/status").json()["instances"]}


def wait_state(mesh: RunningMesh, name: str, state: str, *, not_pid: int = 0) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        instance = instances(mesh).get(name, {"state": "absent"})
        if instance["state"] == state and instance.get("pid") != not_pid:
            return
        assert time.monotonic() < deadline, instance
        time.sleep(0.1)


def restart(mesh: RunningMesh, service: str) -> None:
    """Have an instance of the launcher's leave, and wait for its next life."""
    child = mesh.child(f"{service} 0")
    child.send_signal(signal.SIGTERM)
    child.wait(timeout=READY_SECONDS)
    wait_state(mesh, f"{service}.0", "ready", not_pid=child.pid)


def test_instances_join_and_leave(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_mesh(model_dir, *SIM) as mesh, ExitStack() as exits:
        joined = Joined(mesh, model_dir)
        exits.callback(joined.kill_all)
        load = Load(mesh)
        with load.running():
            load.goes_on()
            for service in SERVICES[:-1]:
                joined.start(service, *(SIM if service == "model-executor" else ()))
            load.urls = [mesh.url, joined.start_gateway()]
            load.goes_on()

            assert run(["status", mesh.url]) == 0
            table = capsys.readouterr().out
            for service in SERVICES:
                assert f"{service}.0 " in table and f"{service}.{INDEX} " in table

            for service in SERVICES:
                restart(mesh, service)
                load.goes_on()
            load.urls = [mesh.url]
            load.goes_on()
            for service in SERVICES:
                joined.leave(service)
            load.goes_on()
        assert not load.faults, load.faults
        mesh.wait_idle()


def test_the_only_ones_of_their_kind_restart(model_dir: Path) -> None:
    """What is new waits for the next life of whoever leaves."""
    with running_mesh(model_dir, *SIM) as mesh:
        load = Load(mesh)
        with load.running():
            for service in SERVICES:
                load.goes_on()
                restart(mesh, service)
            load.goes_on()
        assert not load.faults, load.faults
        mesh.wait_idle()

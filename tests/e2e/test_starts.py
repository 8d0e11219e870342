"""Starts that are interrupted, refused, crowded or given up, and what they leave: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.e2e.harness import READY_SECONDS, RunningMesh, running_mesh

SIM = ("--device", "simulated")
STARTING = "starting 5 processes"


class Start:
    """`headrace serve`, which need not get ready; it says on standard error what it imports."""

    def __init__(self, model: Path, scratch: Path, *flags: str) -> None:
        self.runtime = scratch / "run"
        self.runtime.mkdir(exist_ok=True)
        self._log = scratch / f"log of {time.monotonic_ns()}"
        words = ["-m", "services.launcher", "serve", str(model), *SIM, *flags]
        with self._log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-X", "importtime", *words],
                stderr=stream,
                env=os.environ | {"XDG_RUNTIME_DIR": str(self.runtime)},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def lines(self) -> list[str]:
        """What it said itself."""
        return [line for line in self.said.splitlines() if not line.startswith("import time:")]

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while text not in self.said:
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)

    def end(self, number: signal.Signals) -> int:
        """Send a signal to its process group; its exit code, when none of its processes is left."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, number)
        code = self.process.wait(timeout=60)
        assert not psutil.wait_procs(family, timeout=20)[1]
        return code


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For the sockets, as `tmp_path` can be too long for them."""
    with tempfile.TemporaryDirectory(prefix="hr-test-", dir="/tmp") as directory:
        yield Path(directory)


@contextmanager
def started(model: Path, scratch: Path, *flags: str) -> Iterator[Start]:
    start = Start(model, scratch, *flags)
    try:
        yield start
    finally:
        if start.process.poll() is None:
            start.end(signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.mark.parametrize("moment", ["asyncio", "huggingface_hub", STARTING, '"event": "started"'])
def test_an_interrupt_while_it_starts(model_dir: Path, scratch: Path, moment: str) -> None:
    """R052: Ctrl-C while it loads its own modules, starts its services, and while they load."""
    port = free_port()
    with started(model_dir, scratch, "--port", str(port)) as start:
        start.wait_for(moment)
        assert start.end(signal.SIGINT) in (0, 130)
        assert "Traceback" not in start.said
        assert not list(start.runtime.iterdir())
        socket.create_server(("127.0.0.1", port)).close()


def test_two_interrupts_during_a_long_prompt(model_dir: Path) -> None:
    """R052: the first one drains, the second ends it whatever it computes."""
    with running_mesh(model_dir, *SIM, "--sim", "prefill=0.01") as mesh:
        children = psutil.Process(mesh.process.pid).children()

        def ask() -> None:
            with contextlib.suppress(httpx.TransportError, AssertionError):
                mesh.complete([5] * 8000, max_tokens=1)

        asking = threading.Thread(target=ask)
        asking.start()
        while not mesh.metric("headrace_num_requests_running"):
            time.sleep(0.02)
        mesh.process.send_signal(signal.SIGINT)
        while mesh.client.get("/ready").status_code == 200:
            time.sleep(0.02)
        mesh.stop(signal.SIGINT)
        asking.join()
        assert not psutil.wait_procs(children, timeout=20)[1]
        assert "Traceback" not in mesh.log.read_text()


def test_one_port_for_two(model_dir: Path, scratch: Path) -> None:
    """R053: of two starts at the same moment one lives; killed, it can be started again at once."""
    port = free_port()
    flags = ("--port", str(port))
    with started(model_dir, scratch, *flags) as one, started(model_dir, scratch, *flags) as other:
        deadline = time.monotonic() + READY_SECONDS
        while not (ended := [start for start in (one, other) if start.process.poll() is not None]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (refused,) = ended
        assert refused.process.returncode == 2
        assert len(refused.lines) == 1
        assert str(port) in refused.lines[0]
        winner = one if refused is other else other
        winner.wait_for("ready after")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/health").status_code == 200  # and the connection stays open
            assert winner.end(signal.SIGKILL) == -signal.SIGKILL
            with started(model_dir, scratch, *flags) as again:
                again.wait_for(STARTING)  # what comes after the port
                assert again.end(signal.SIGTERM) == 0


def test_nothing_shared_is_left(model_dir: Path) -> None:
    """R055: no process shares memory with another, so none of it can be left behind."""
    with running_mesh(model_dir, *SIM) as mesh:
        assert mesh.text("hi", max_tokens=2)
        launcher = psutil.Process(mesh.process.pid)
        for process in (launcher, *launcher.children()):
            paths = [mapped.path for mapped in process.memory_maps()]
            assert not [path for path in paths if path.startswith(("/dev/shm", "/SYSV"))]
        assert mesh.stop() == 0
        assert not list(mesh.runtime.iterdir())
        said = mesh.log.read_text()
        assert not [word for word in ("leaked", "resource_tracker", "Traceback") if word in said]


def test_a_start_that_fails_leaves_nothing(model_dir: Path, scratch: Path) -> None:
    """R055: and one line says why, another what had to end with it."""
    model = scratch / "model"
    model.mkdir()
    for file in model_dir.iterdir():
        (model / file.name).symlink_to(file)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text("{}")
    with started(model, scratch, "--port", "0") as start:
        children: set[psutil.Process] = set()
        while start.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                children |= set(psutil.Process(start.process.pid).children())
            time.sleep(0.02)
        assert start.process.returncode == 1
        assert not psutil.wait_procs(children, timeout=20)[1]
        assert not list(start.runtime.iterdir())
        assert "before the mesh was ready" in start.lines[-1]
        assert any("cannot be read" in line for line in start.lines[:-1])
        assert "Traceback" not in start.said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(mesh: RunningMesh) -> None:
    """R056: the CPU is taken unless a GPU is asked for by name, which is refused at once."""
    assert mesh.text("hi", max_tokens=1)
    command = [sys.executable, "-P", "-m", "services.launcher", "serve", "--device", "cuda"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "--device cuda" in line

"""Starting and ending: clear refusals, drains, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.harness import RunningMesh, running_mesh

PROMPT = "The history of the water mill begins"


@pytest.fixture
def own_mesh(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, "--device", "simulated", "--sim", "base=0.02") as mesh:
        yield mesh


def refused(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "services.launcher", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["serve", "/no/such/model"], "/no/such/model"),
        (["serve", "--port", "seventy"], "--port"),
        (["serve", "--dtype", "float8"], "--dtype"),
        (["serve", "--max-model-len", "1000000", "--port", "0"], "1000000"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--host", "203.0.113.1"], "203.0.113.1"),
        (["scheduler"], "--mesh"),
        (["scheduler", "--mesh", "dns"], "--allow-plain-tcp"),
        (["tokenizer", "--mesh", "ipc:/no/such/place"], "/no/such/place"),
    ],
)
def test_one_clear_line(words: list[str], reason: str) -> None:
    result = refused(*words)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert reason in result.stderr


def test_taken_port() -> None:
    """R053: found out before anything else, and said in one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = refused("serve", "--port", str(port))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert str(port) in result.stderr


def test_sigterm_drains(own_mesh: RunningMesh) -> None:
    expected = own_mesh.text(PROMPT, max_tokens=100, ignore_eos=True)
    body = {"model": "smol", "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
    pieces: list[str] = []
    fresh = httpx.Client(base_url=own_mesh.url)  # a connection that is open before the drain
    with (
        fresh,
        own_mesh.client.stream(
            "POST", "/v1/completions", json={**body, "temperature": 0, "stream": True}
        ) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 3:
                    own_mesh.process.send_signal(signal.SIGTERM)
                    assert _refuses(fresh, body)
    assert "".join(pieces) == expected
    assert own_mesh.process.wait(timeout=30) == 0


def _refuses(client: httpx.Client, body: dict[str, object]) -> bool:
    """Whether the draining server turns a new request away."""
    for _ in range(50):
        try:
            response = client.post("/v1/completions", json={**body, "max_tokens": 1})
        except httpx.TransportError:  # it closed the idle connection, and accepts no other
            return True
        if response.status_code == 503:
            return bool(response.json()["error"]["message"])
        time.sleep(0.02)
    return False


def test_second_signal_ends_at_once(own_mesh: RunningMesh) -> None:
    """R052: while it serves."""

    def endless() -> None:
        with contextlib.suppress(httpx.TransportError, AssertionError):
            own_mesh.complete(PROMPT, max_tokens=4000, ignore_eos=True)

    asking = threading.Thread(target=endless)
    asking.start()
    while not own_mesh.metric("headrace_num_requests_running"):
        time.sleep(0.05)
    children = psutil.Process(own_mesh.process.pid).children()
    own_mesh.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert own_mesh.process.poll() is None  # it drains
    own_mesh.process.send_signal(signal.SIGINT)
    own_mesh.process.wait(timeout=15)
    asking.join()
    assert not [child for child in children if child.is_running()]


def test_nothing_is_left_after_kill_9(own_mesh: RunningMesh) -> None:
    """R043: of the first process."""
    children = psutil.Process(own_mesh.process.pid).children()
    assert len(children) == 5
    port = httpx.URL(own_mesh.url).port
    own_mesh.process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    socket.create_server(("127.0.0.1", port or 0)).close()


def test_run_directory_is_private(own_mesh: RunningMesh) -> None:
    (directory,) = own_mesh.runtime.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_uid == os.getuid()
    assert len(list(directory.iterdir())) == 5


def test_api_key_is_in_no_process_list(model_dir: Path) -> None:
    """R101, and R100: a directory for metrics that cannot be used is not looked at."""
    environment = {"HEADRACE_API_KEY": "sesame-opens", "PROMETHEUS_MULTIPROC_DIR": "/no/such"}
    with running_mesh(model_dir, "--device", "simulated", **environment) as mesh:
        launcher = psutil.Process(mesh.process.pid)
        for process in (launcher, *launcher.children()):
            assert "sesame" not in " ".join(process.cmdline())
        assert mesh.client.get("/v1/models").status_code == 401
        headers = {"Authorization": "Bearer sesame-opens"}
        assert mesh.client.get("/v1/models", headers=headers).status_code == 200
        metrics = mesh.client.get("/metrics", headers=headers)
        assert metrics.status_code == 200
        assert "headrace_time_to_first_token_seconds_count 0.0" in metrics.text
        assert "sesame" not in mesh.log.read_text() + metrics.text

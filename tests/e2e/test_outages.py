"""While a process is missing: health says so at any load, and what was asked for waits for it.

The launcher is stopped meanwhile, so that a successor comes when the test has seen enough.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.harness import MODEL, READY_SECONDS, RunningMesh, running_mesh
from tests.e2e.sse import stream

SIM = ("--device", "simulated", "--sim", "base=0.005,prefill=0.001")
PROMPT = "The history of the water mill begins"
LOOKS = 20  # at health
SERVICES = ["tokenizer", "scheduler", "detokenizer", "model-executor"]


@pytest.fixture(scope="module")
def simulated(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, *SIM, "--hang-timeout", "60") as mesh:
        yield mesh
        mesh.wait_idle()


@contextmanager
def missing(mesh: RunningMesh, title: str) -> Iterator[None]:
    """Within it, this process is dead and has no successor; after it, the mesh is ready again."""
    dead = mesh.child(title)
    launcher = psutil.Process(mesh.process.pid)
    launcher.suspend()
    try:
        dead.kill()
        yield
    finally:
        launcher.resume()
    wait_status(mesh, "/ready", 200)


def wait_status(mesh: RunningMesh, path: str, status: int) -> httpx.Response:
    deadline = time.monotonic() + READY_SECONDS
    while (answer := mesh.client.get(path)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)
    return answer


class Load:
    """Short requests one after another, of several clients, while the block lasts."""

    def __init__(self, mesh: RunningMesh, clients: int = 4) -> None:
        self.answers: list[str] = []  # or errors
        self._mesh = mesh
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(READY_SECONDS)
            assert not thread.is_alive(), "a request hangs"

    def wait_for_more(self, answers: int) -> None:
        wanted = len(self.answers) + answers
        deadline = time.monotonic() + READY_SECONDS
        while len(self.answers) < wanted:
            assert time.monotonic() < deadline, "requests hang"
            time.sleep(0.01)

    def _ask(self) -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        while not self._ended.wait(0.01):
            answer = self._mesh.client.post("/v1/completions", json=body)
            good = answer.status_code == 200
            self.answers.append(answer.json()["choices"][0]["text"] if good else answer.text)


@pytest.mark.parametrize("service", SERVICES)
def test_health_and_streams_while_a_process_is_missing(
    simulated: RunningMesh, service: str
) -> None:
    """R043, R044: 503 that names it, all the while; then all goes on where it was."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0}
    expected = simulated.text(PROMPT, max_tokens=100)
    short = simulated.text(PROMPT, max_tokens=4)
    streamed: list[str] = []
    reading = threading.Thread(target=lambda: streamed.append(stream(simulated, **body).text))
    with Load(simulated) as load:
        reading.start()
        while simulated.metric("headrace_num_requests_running") == 0:
            time.sleep(0.01)
        with missing(simulated, f"{service} 0"):
            assert service in wait_status(simulated, "/health", 503).json()["missing"]
            for _ in range(LOOKS):
                assert simulated.client.get("/health").status_code == 503
                assert simulated.client.get("/ready").status_code == 503
        load.wait_for_more(8)  # those that waited, and others
    reading.join(READY_SECONDS)
    assert streamed == [expected]
    assert set(load.answers) == {short}
    assert simulated.client.get("/health").status_code == 200


def test_a_killed_gateway_breaks_its_connections_and_comes_back(simulated: RunningMesh) -> None:
    """R043: nobody waits for ever, and what was asked for is not computed to its end."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    with (
        pytest.raises(httpx.TransportError),
        simulated.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        simulated.child("gateway 0").kill()
        list(lines)
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            if simulated.client.get("/ready").status_code == 200:
                break
        except httpx.TransportError:
            assert time.monotonic() < deadline
    simulated.wait_idle()
    assert simulated.text(PROMPT, max_tokens=4)


def test_health_beside_long_prompts(simulated: RunningMesh) -> None:
    """R058: it waits for nobody, says since when no token has come, and computes nothing."""
    names = ("prompt_tokens", "generation_tokens", "request_success")
    before = {name: simulated.metric(f"headrace_{name}_total") for name in names}
    prompts = [[5 + number] * 1000 for number in range(8)]
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(simulated.complete(prompts, max_tokens=2))
    )
    asking.start()
    while simulated.metric("headrace_num_requests_running") == 0:
        time.sleep(0.01)
    for _ in range(LOOKS):
        answer = simulated.client.get("/health")
        assert answer.status_code == 200
        assert answer.json()["seconds_since_last_token"] >= 0
    assert asking.is_alive()  # a second for each prompt
    asking.join(READY_SECONDS)
    assert answers[0]["usage"]["completion_tokens"] == 16
    simulated.wait_idle()
    after = {name: simulated.metric(f"headrace_{name}_total") - before[name] for name in names}
    assert after == {"prompt_tokens": 8000, "generation_tokens": 16, "request_success": 8}

"""Each service started alone, over TCP, as containers do it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from shared.types import ServiceName
from tests.e2e.harness import READY_SECONDS


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def test_five_services_over_tcp(model_dir: Path) -> None:
    *ports, http = free_ports(len(ServiceName) + 1)
    at = dict(zip(ServiceName, ports, strict=True))
    mesh = "static:" + ",".join(f"{name}=127.0.0.1:{port}" for name, port in at.items())
    common = {"HEADRACE_MESH": mesh, "HEADRACE_ALLOW_PLAIN_TCP": "yes", "HEADRACE_PORT": str(http)}
    own = {"HEADRACE_MODEL": str(model_dir), "HEADRACE_DEVICE": "simulated"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "services.launcher", name, "--mesh-port", str(port)],
            env=os.environ | common | own,
        )
        for name, port in at.items()
    ]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{http}") as client:
            wait_ready(client)
            body = {"prompt": "Over TCP", "max_tokens": 5}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 5
            assert answer["model"] == model_dir.name
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(timeout=30) for process in processes]
    assert codes == [0] * len(processes)


def wait_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)

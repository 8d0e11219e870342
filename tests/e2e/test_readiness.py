"""Requests that come at the very moment at which a server says that it is ready."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.crowd import Answer, crowd
from tests.e2e.harness import READY_SECONDS, running_mesh

SLOWED_TIMES = 5


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def press_when_ready(url: str) -> list[Answer]:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=READY_SECONDS).status_code == 200:
                break
        assert time.monotonic() < deadline
    bodies = [{"prompt": f"Early {number}", "max_tokens": 2} for number in range(50)]
    return asyncio.run(crowd(url, bodies))


def slow_down(module: str) -> None:
    """Stop one of the processes again and again while it starts."""
    deadline = time.monotonic() + READY_SECONDS
    while not (found := [one for one in descendants() if module in command(one)]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for _ in range(SLOWED_TIMES):
        found[0].suspend()
        time.sleep(0.2)
        found[0].resume()
        time.sleep(0.1)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def command(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []


@pytest.mark.parametrize("module", ["scheduler", "detokenizer", "tokenizer"])
def test_nothing_is_lost_at_the_moment_of_readiness(model_dir: Path, module: str) -> None:
    """R082"""
    port = free_port()
    flags = ("--device", "simulated", "--sim", "base=0.002", "--port", str(port))
    with ThreadPoolExecutor(2) as pool:
        pressing = pool.submit(press_when_ready, f"http://127.0.0.1:{port}")
        slowing = pool.submit(slow_down, f"services.{module}")
        with running_mesh(model_dir, *flags) as mesh:
            assert [answer.status for answer in pressing.result()] == [200] * 50
            slowing.result()
            mesh.wait_idle()

"""Crowds of clients on a simulated accelerator: whoever is served does not notice the others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.crowd import Answer, crowd, post
from tests.e2e.harness import RunningMesh, running_mesh

FLAGS = ("--device", "simulated", "--sim", "base=0.005", "--max-num-seqs", "256")
STOPPED_SECONDS = 6.0  # over a thousand iterations
MIB = 1 << 20


@pytest.fixture(scope="module")
def simulated(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, *FLAGS, "--hang-timeout", "30") as mesh:
        yield mesh
        mesh.wait_idle()


def streams(count: int, tokens: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Stream {number} of many", "max_tokens": tokens, "stream": True}
        for number in range(count)
    ]


def test_receivers_that_stand_still(simulated: RunningMesh) -> None:
    """R083: the detokenizer, then the gateway, while more is sent to them than ZeroMQ's mark."""
    bodies = [*streams(199, 200), {"prompt": "A long one", "max_tokens": 2700, "stream": True}]
    expected = {
        number: simulated.text(bodies[number]["prompt"], max_tokens=200) for number in (0, 9)
    }
    children = psutil.Process(simulated.process.pid).children()
    before = {child: child.memory_info().rss for child in children}

    def stand_still() -> None:
        for title in ("detokenizer 0", "gateway 0"):
            time.sleep(0.5)
            child = simulated.child(title)
            child.suspend()
            time.sleep(STOPPED_SECONDS)
            child.resume()

    stopping = threading.Thread(target=stand_still)
    stopping.start()
    answers = asyncio.run(crowd(simulated.url, bodies))
    stopping.join()
    for body, answer in zip(bodies, answers, strict=True):
        assert len(answer.text.split()) == body["max_tokens"]
    for number, text in expected.items():
        assert answers[number].text == text
    for child, size in before.items():
        assert child.memory_info().rss - size < 64 * MIB, child.cmdline()
    simulated.wait_idle()


def test_tokens_come_one_by_one(simulated: RunningMesh) -> None:
    """R094: not in bursts, and to all at the same time."""
    answers = asyncio.run(crowd(simulated.url, streams(128, 100)))
    assert min(len(answer.events) for answer in answers) > 1  # a busy machine joins some
    assert max(answer.times[0] for answer in answers) < min(answer.times[-1] for answer in answers)


class Health:
    """Asked 20 times a second while the block lasts."""

    def __init__(self, url: str) -> None:
        self.statuses: list[int] = []
        self._url = url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Health:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.seconds = time.monotonic() - self._began

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._ended.wait(0.05):
                self.statuses.append(client.get("/health").status_code)


@pytest.mark.parametrize(
    "crowding",
    [
        pytest.param([{"prompt": "mill wheel " * 190_000, "max_tokens": 1}], id="2 MB"),
        pytest.param([{"prompt": f"Hi {n}", "max_tokens": 2} for n in range(1000)], id="1000"),
    ],
)
def test_streams_and_health_beside_much_to_tokenize(
    simulated: RunningMesh, crowding: list[dict[str, Any]]
) -> None:
    """R092"""

    async def beside() -> tuple[list[Answer], list[Answer]]:
        running = asyncio.create_task(crowd(simulated.url, streams(5, 800)))
        await asyncio.sleep(0.3)
        others = await crowd(simulated.url, crowding)
        return await running, others

    with Health(simulated.url) as health:
        running, others = asyncio.run(beside())
    assert set(health.statuses) == {200}
    assert len(health.statuses) > 20 * health.seconds / 8
    assert {answer.status for answer in others} == {400 if len(crowding) == 1 else 200}
    began, ended = min(one.asked for one in others), max(one.times[-1] for one in others)
    for answer in running:
        assert len(answer.text.split()) == 800
        assert sum(began < at < ended for at in answer.times) >= 3  # it did not wait for the others


def test_slow_readers_get_all(simulated: RunningMesh) -> None:
    """R095: who reads slowly is no client that left, and each that leaves is told of once."""
    bodies = streams(40, 100)

    async def slowly() -> list[Answer]:
        async def pace() -> None:
            await asyncio.sleep(0.05)

        async with asyncio.timeout(60):
            return await asyncio.gather(
                *(post(simulated.url, body, size=2048, pace=pace) for body in bodies)
            )

    async def leave() -> None:
        for body in bodies[:10]:
            with_patience = asyncio.wait_for(post(simulated.url, body | {"max_tokens": 4000}), 0.3)
            await asyncio.gather(with_patience, return_exceptions=True)

    before = len(simulated.log.read_text())
    for answer, body in zip(asyncio.run(slowly()), bodies, strict=True):
        assert len(answer.text.split()) == body["max_tokens"]
    asyncio.run(leave())
    simulated.wait_idle()
    lines = [
        json.loads(line)
        for line in simulated.log.read_text()[before:].splitlines()
        if '"event": "request"' in line
    ]
    assert Counter(line.get("aborted") for line in lines) == {None: 40, "client closed": 10}
    assert len({line["request_id"] for line in lines}) == 50

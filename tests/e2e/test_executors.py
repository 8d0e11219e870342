"""Several executors, and several schedulers that share them: equal texts, whoever dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import READY_SECONDS, RunningMesh, running_mesh
from tests.e2e.reference import NEW_TOKENS, Reference
from tests.e2e.test_recovery import PROMPTS, Answer, Streams

BODIES: list[dict[str, Any]] = [
    {"prompt": f"{number}. {prompt}", "max_tokens": 20, "seed": number, "temperature": number % 2}
    for number, prompt in enumerate(PROMPTS * 2)
]


def two_executors(model: Path, *flags: str) -> Any:
    return running_mesh(model, "--executors", "2", "--dtype", "float32", *flags)


@pytest.fixture(scope="module")
def pair(model_dir: Path) -> Iterator[RunningMesh]:
    """One scheduler, two executors."""
    with two_executors(model_dir) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def alone(pair: RunningMesh) -> list[Answer]:
    """What each request gets with nobody beside it."""
    return [Streams(pair, [body]).join()[0] for body in BODIES]


def wait_until(mesh: RunningMesh, metric: str, value: float, **labels: Any) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while mesh.metric(metric, **labels) != value:
        assert time.monotonic() < deadline, mesh.metric(metric, **labels)
        time.sleep(0.1)


def test_a_crowd_gets_what_each_gets_alone(pair: RunningMesh, reference: Reference) -> None:
    cases = reference.mixed(33)
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda case: pair.text(case.prompt, max_tokens=NEW_TOKENS), cases)
    assert list(texts) == [case.text for case in cases]
    pair.wait_idle()


def test_one_executor_dies_and_the_other_goes_on(pair: RunningMesh, alone: list[Answer]) -> None:
    streams = Streams(pair, BODIES)
    streams.wait_under_way()
    for index in range(2):
        name = f"model-executor.{index}"
        assert pair.metric("headrace_executor_requests_running", executor=name) > 0
    pair.child("model-executor 0").kill()
    assert streams.join() == alone
    wait_until(pair, "headrace_recoveries_total", 1, service="model-executor")
    pair.wait_idle()


def test_two_schedulers_share_two_executors_and_one_dies(
    model_dir: Path, alone: list[Answer]
) -> None:
    with two_executors(model_dir, "--schedulers", "2") as mesh:
        wait_until(mesh, "headrace_executors", 2)
        streams = Streams(mesh, BODIES)
        streams.wait_under_way()
        for index in range(2):  # each has one
            assert mesh.metric("headrace_executors", scheduler=f"scheduler.{index}") == 1
        mesh.child("scheduler 0").kill()
        assert streams.join() == alone
        mesh.wait_idle()
        for index in range(2):  # and again
            wait_until(mesh, "headrace_executors", 1, scheduler=f"scheduler.{index}")
        assert Streams(mesh, BODIES).join() == alone

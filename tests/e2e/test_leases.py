"""The executor goes on while the scheduler stands still."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import MODEL, RunningMesh, running_mesh

WHILE_STOPPED = 15  # tokens; a lease of 64 is renewed when half of it is used, or somewhat later


@pytest.fixture(scope="module")
def simulated(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, "--device", "simulated", "--sim", "base=0.005") as mesh:
        yield mesh


def test_streams_go_on_while_the_scheduler_is_stopped(simulated: RunningMesh) -> None:
    options = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
    expected = simulated.text("Mill", **options)
    body = {"model": MODEL, "prompt": "Mill", **options, "stream": True}
    scheduler = simulated.child("scheduler 0")
    pieces: list[str] = []
    try:
        with simulated.client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 20:
                    scheduler.send_signal(signal.SIGSTOP)
                if len(pieces) == 20 + WHILE_STOPPED:  # would not come without a lease
                    scheduler.send_signal(signal.SIGCONT)
    finally:
        scheduler.send_signal(signal.SIGCONT)
    assert "".join(pieces) == expected
    simulated.wait_idle()


def test_a_newcomer_joins_a_leased_batch(simulated: RunningMesh) -> None:
    """It does not wait for the lease to end."""
    before = simulated.metric("headrace_leases_total")
    body = {"model": MODEL, "prompt": "Long", "max_tokens": 400, "stream": True}
    with simulated.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        for _ in range(20):
            next(lines)
        assert simulated.text("Short", max_tokens=3)
        assert simulated.metric("headrace_num_requests_running") == 1
        assert sum(1 for _ in lines) > 100
    assert simulated.metric("headrace_leases_total") > before
    simulated.wait_idle()

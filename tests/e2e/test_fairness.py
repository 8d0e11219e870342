"""Fair shares and priorities over HTTP, on a simulated accelerator.

Time is told by iterations: there is one slot, so each is a token of the one that runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import MODEL, RunningMesh, running_mesh

SIM = ("--device", "simulated", "--max-num-seqs", "1", "--sim", "base=0.03")
TOKENS = 10
OPTIONS = {"max_tokens": TOKENS, "ignore_eos": True}
CROWD = 300
SCRAPES = 30  # iterations that may pass while metrics are asked for
PATIENCE = 20.0  # seconds


@pytest.fixture(scope="module")
def simulated(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, *SIM) as mesh:
        first = mesh.client.get("/metrics").text
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
            assert f"headrace_{name} 0.0" in first
        assert "headrace_time_to_first_token_seconds_count 0.0" in first
        yield mesh
        mesh.wait_idle()


def body(prompt: Any, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **OPTIONS, **options}


def wait_for_waiting(mesh: RunningMesh, count: int) -> None:
    """Until so many requests, or more, wait for a place."""
    deadline = time.monotonic() + PATIENCE
    while mesh.metric("headrace_num_requests_waiting") < count:
        assert time.monotonic() < deadline


def test_a_crowd_of_one_tenant_hardly_delays_another(simulated: RunningMesh) -> None:
    prompts = [f"Number {number} of a crowd" for number in range(CROWD)]
    crowd = body(prompts, user="crowd", stream=True)
    with simulated.client.stream("POST", "/v1/completions", json=crowd):
        wait_for_waiting(simulated, CROWD // 2)
        before = simulated.metric("headrace_iterations_total")
        usage = simulated.complete("A single one", **OPTIONS, user="other")["usage"]
        took = simulated.metric("headrace_iterations_total") - before
        assert usage["completion_tokens"] == TOKENS
        # What runs comes to its end, and then it is its turn.
        assert took <= 2 * TOKENS + SCRAPES
        assert simulated.metric("headrace_num_requests_waiting") > CROWD // 2
    simulated.wait_idle()


def test_the_queue_as_autoscalers_see_it(simulated: RunningMesh) -> None:
    """R119: its gauges are there from the first scrape, rise, and fall to zero, by stable names."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert "`headrace_num_requests_running`, `_waiting`" in page
    prompts = [f"Number {number} in a queue" for number in range(21)]
    asked = body(prompts, stream=True, max_tokens=1000)  # the first holds the slot all the while
    with simulated.client.stream("POST", "/v1/completions", json=asked):
        wait_for_waiting(simulated, 20)
        assert simulated.metric("headrace_num_requests_running") == 1
        assert simulated.metric("headrace_kv_cache_usage_perc") > 0
        assert simulated.metric("headrace_num_requests_waiting") <= 20
    simulated.wait_idle()
    assert simulated.metric("headrace_num_requests_waiting") == 0


def test_the_urgent_go_first_and_equals_as_they_came(simulated: RunningMesh) -> None:
    ended: list[str] = []

    def ask(name: str, priority: int) -> None:
        simulated.text(name, **OPTIONS, priority=priority)
        ended.append(name)

    holding = body("Holds the slot", max_tokens=500, stream=True)
    asked = {"low": 5, "plain": 0, "plain too": 0, "urgent": -2}
    with ThreadPoolExecutor(len(asked)) as pool:
        with simulated.client.stream("POST", "/v1/completions", json=holding) as holder:
            lines = holder.iter_lines()  # to be kept: the stream ends with it
            next(lines)
            asking = []
            for place, (name, priority) in enumerate(asked.items(), 1):
                asking.append(pool.submit(ask, name, priority))
                wait_for_waiting(simulated, place)
        for one in asking:
            one.result()
    assert ended == ["urgent", "plain", "plain too", "low"]

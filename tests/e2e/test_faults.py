"""Processes that die: streams go on or end with a clear error, and the mesh heals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.harness import MODEL, READY_SECONDS, RunningMesh, running_mesh

PROMPT = "The history of the water mill begins"
TOKENS = 60


@pytest.fixture(scope="module")
def fragile(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, "--dtype", "float32") as mesh:
        yield mesh


def stream_killing(mesh: RunningMesh, victim: str) -> tuple[list[dict[str, Any]], psutil.Process]:
    """All events of a greedy stream during which a process is killed, and that process."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    events: list[dict[str, Any]] = []
    process = mesh.child(victim)
    with mesh.client.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "ignore_eos": True}
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == 5:
                    process.kill()
    return events, process


def successor_lives(mesh: RunningMesh, dead: psutil.Process) -> bool:
    """Whether the launcher has started as many processes as there were."""
    children = psutil.Process(mesh.process.pid).children()
    return len(children) == 5 and dead not in children


def wait_ready(mesh: RunningMesh, *, after: psutil.Process | None = None) -> None:
    """Ready again; `after` a process that is dead, which the gateway may hear a little later."""
    deadline = time.monotonic() + READY_SECONDS
    while after is not None and not successor_lives(mesh, after):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while mesh.client.get("/ready").status_code != 200:
        assert time.monotonic() < deadline, mesh.client.get("/ready").text
        time.sleep(0.1)


def test_a_stream_survives_the_executor(fragile: RunningMesh) -> None:
    wait_ready(fragile)
    expected = fragile.text(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    events, dead = stream_killing(fragile, "model-executor 0")
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    wait_ready(fragile, after=dead)
    fragile.wait_idle()


@pytest.mark.parametrize("victim", ["scheduler 0", "detokenizer 0"])
def test_others_end_a_stream_with_an_error(fragile: RunningMesh, victim: str) -> None:
    wait_ready(fragile)
    events, dead = stream_killing(fragile, victim)
    assert events[-1]["error"]["message"]
    assert all("error" not in event for event in events[:-1])
    wait_ready(fragile, after=dead)
    assert fragile.text("One, two, three,", max_tokens=4)
    fragile.wait_idle()


def test_the_client_library_raises(fragile: RunningMesh) -> None:
    wait_ready(fragile)
    client = openai.OpenAI(base_url=f"{fragile.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    scheduler = fragile.child("scheduler 0")
    with pytest.raises(openai.APIError) as caught:
        for number, _ in enumerate(stream):
            if number == 3:
                scheduler.kill()
    assert "scheduler" in caught.value.message
    wait_ready(fragile, after=scheduler)


def test_the_tokenizer_comes_back(fragile: RunningMesh) -> None:
    wait_ready(fragile)
    tokenizer = fragile.child("tokenizer 0")
    tokenizer.kill()
    assert fragile.text(PROMPT, max_tokens=3)
    wait_ready(fragile, after=tokenizer)


def test_health_tells_a_loss(fragile: RunningMesh) -> None:
    wait_ready(fragile)
    assert fragile.client.get("/health").status_code == 200
    executor = fragile.child("model-executor 0")
    executor.kill()
    deadline = time.monotonic() + 5
    while (health := fragile.client.get("/health")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert health.status_code == 503
    assert "model-executor" in health.text
    wait_ready(fragile, after=executor)
    assert fragile.client.get("/health").status_code == 200

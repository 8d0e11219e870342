"""A cache far smaller than the context: what fits is served, what cannot is told, nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import MODEL, RunningMesh, running_mesh

BLOCK = 16
CAPACITY = 16 * BLOCK  # tokens
CONTEXT = 1024
FLAGS = ("--num-gpu-blocks-override", "16", "--max-model-len", str(CONTEXT), "--max-num-seqs", "4")
SIM = ("--device", "simulated", "--sim", "base=0.002,prefill=0.0002")
ROUNDS = 12


@pytest.fixture(scope="module")
def small(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, *SIM, *FLAGS) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def all_is_free_again(small: RunningMesh) -> Iterator[None]:
    """Idle, and one that takes the whole cache finds its place, which it never would otherwise."""
    yield
    small.wait_idle()
    filling = small.complete([7] * (CAPACITY - 20), max_tokens=21, ignore_eos=True)
    assert filling["usage"]["completion_tokens"] == 21
    small.wait_idle()


def test_what_never_fits_is_refused(small: RunningMesh) -> None:
    """R046: though the context has room for it; nobody waits behind it, whoever comes first."""
    text = small.text("The mill", max_tokens=4)
    with ThreadPoolExecutor(1) as beside:
        before = beside.submit(small.text, "The mill", max_tokens=4)
        large = small.post("/v1/completions", prompt=[5] * 400, max_tokens=4)
        assert small.text("The mill", max_tokens=4) == before.result() == text
    assert large.status_code == 400
    assert str(CAPACITY) in large.json()["error"]["message"]


def test_what_would_outgrow_the_cache(small: RunningMesh) -> None:
    """R046: refused if it asks for that many tokens, else ended where the cache does."""
    asked: dict[str, Any] = {"prompt": [5] * 200, "ignore_eos": True}
    refused = small.post("/v1/completions", **asked, max_tokens=200)
    assert refused.status_code == 400
    assert str(CAPACITY) in refused.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "mill " * 180}], "ignore_eos": True}
    answer = small.post("/v1/chat/completions", **chat).json()  # as long as can be
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CAPACITY + 1  # the last one's KV is never stored


def test_a_full_cache_serves_all_in_the_end(small: RunningMesh) -> None:
    """R047: twelve, where three find a place."""
    prompts = [f"Number {number} of many" for number in range(12)]
    options = {"max_tokens": 70, "ignore_eos": True}
    before = small.metric("headrace_num_preemptions_total")
    choices = small.complete(prompts, **options)["choices"]
    preemptions = small.metric("headrace_num_preemptions_total") - before
    assert 0 < preemptions < 3 * len(prompts)
    assert [choice["text"] for choice in choices] == [small.text(p, **options) for p in prompts]


def leave(mesh: RunningMesh, body: dict[str, Any], events: int) -> None:
    """Close a stream after so many of its events; 0: at its head."""
    whole = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": True, **body}
    with mesh.client.stream("POST", "/v1/completions", json=whole) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        list(islice(lines, events))


def test_nothing_is_kept_of_what_was_refused_left_or_cut(small: RunningMesh) -> None:
    """R050: during a prefill, in the queue, at the very end, at a stop string."""
    text = small.text("Round 0", max_tokens=8)
    stop = text.split()[3]
    for number in range(ROUNDS):
        bodies = [
            ({"prompt": [9 + number] * 240, "max_tokens": 9}, 0),
            ({"prompt": [5] * 400, "max_tokens": 1}, 0),
            ({"prompt": f"Leave {number}", "max_tokens": 60}, number % 8),
            ({"prompt": f"End {number}", "max_tokens": 5}, 5),
            ({"prompt": "Round 0", "max_tokens": 8, "stop": stop}, 9),
        ]
        with ThreadPoolExecutor(2 * len(bodies)) as pool:
            left = [pool.submit(leave, small, body, events) for body, events in 2 * bodies]
            assert small.text("Round 0", max_tokens=8) == text
            for one in left:
                one.result()
        small.wait_idle()
    assert small.client.get("/health").json()["in_flight"] == 0

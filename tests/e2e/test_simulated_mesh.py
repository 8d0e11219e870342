"""A mesh on a simulated accelerator: everything but the model is real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.harness import MODEL, RunningMesh, running_mesh

SIM = ("--device", "simulated", "--max-num-seqs", "48", "--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module")
def simulated(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, *SIM, "--sim", "base=0.004,prefill=0.00001") as mesh:
        yield mesh
        mesh.wait_idle()


def test_a_crowd_gets_what_each_gets_alone(simulated: RunningMesh) -> None:
    """With more streams than slots, and more tokens than the cache holds at once."""
    prompts = [f"Stream {number} of a crowd" for number in range(64)]

    def text(prompt: str) -> str:
        return simulated.text(prompt, max_tokens=150)

    with ThreadPoolExecutor(64) as pool:
        crowd = list(pool.map(text, prompts))
    assert all(len(text.split()) == 150 for text in crowd)
    for number in (0, 17, 63):
        assert text(prompts[number]) == crowd[number]
    assert simulated.metric("headrace_num_preemptions_total") > 0


def test_the_example_of_the_documentation(simulated: RunningMesh) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulated.md").read_text()
    assert f'"text":"{simulated.text("The mill", max_tokens=12)}"' in page


def test_the_executors_time_is_accounted_for(simulated: RunningMesh) -> None:
    names = [f"headrace_executor_{kind}_seconds_total" for kind in ("busy", "bubble", "idle")]
    before = [simulated.metric(name) for name in names]
    simulated.text("Time", max_tokens=50)
    busy, bubble, idle = (
        simulated.metric(name) - was for name, was in zip(names, before, strict=True)
    )
    assert busy == pytest.approx(50 * 0.004, abs=0.001)
    assert 0 <= bubble < busy  # decodes go on under a lease
    assert idle > 0


def test_a_stream_survives_the_executor(simulated: RunningMesh) -> None:
    expected = simulated.text("Survive", max_tokens=40)
    body = {"model": MODEL, "prompt": "Survive", "max_tokens": 40, "temperature": 0}
    pieces: list[str] = []
    with simulated.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 5:
                    simulated.child("model-executor 0").kill()
    assert "".join(pieces) == expected


def test_a_bad_cost_is_one_line_at_the_start(model_dir: Path) -> None:
    words = ["serve", str(model_dir), "--device", "simulated", "--sim", "base=fast"]
    command = [sys.executable, "-P", "-m", "services.launcher", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == "headrace serve: --sim: 'base=fast' has no number\n"

"""A mesh on a simulated accelerator: everything but the model is real."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
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
    choices = simulated.complete(prompts, max_tokens=150)["choices"]
    crowd = [choice["text"] for choice in choices]
    assert all(len(text.split()) == 150 for text in crowd)
    for number in (0, 17, 63):
        assert simulated.text(prompts[number], max_tokens=150) == crowd[number]
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


def test_a_slow_reader_holds_nobody_up(simulated: RunningMesh) -> None:
    """Its stream waits for it, merged, while others run at their pace."""
    body = {"model": MODEL, "prompt": "Slow", "temperature": 0.5, "seed": 1, "n": 16}
    body |= {"max_tokens": 300, "ignore_eos": True}
    expected = simulated.client.post("/v1/completions", json=body).json()["choices"]
    content = json.dumps({**body, "stream": True}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((httpx.URL(simulated.url).host, httpx.URL(simulated.url).port))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
        slow.sendall(b"Content-Type: application/json\r\n")
        slow.sendall(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        while not simulated.metric("headrace_num_requests_running"):
            time.sleep(0.01)
        assert simulated.text("Fast", max_tokens=10)
        simulated.wait_idle()  # all of the slow one's tokens are there, and nobody has read any
        received = b"".join(iter(lambda: slow.recv(1 << 16), b""))
    lines = [line for line in received.decode().split("\n") if line.startswith("data: {")]
    assert len(lines) < 16 * 300 / 2
    texts = [""] * 16
    for choice in (choice for line in lines for choice in json.loads(line[6:])["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in expected]


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

"""Processes that are killed, one or two at a time, while streams run: no client sees more than a
pause, and what follows it is what would have followed anyway."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import MODEL, READY_SECONDS, RunningMesh, running_mesh

TOKENS = 40
PROMPTS = [
    "The history of the water mill begins",
    "Once upon a time, in a village by the river,",
    "A list of the largest lakes of the world:",
]


@dataclass
class Answer:
    """All that a client learns of one request."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[Any]] = field(default_factory=dict)  # with their logprobs
    usage: dict[str, int] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)

    def read(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
        for choice in event.get("choices", []):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                assert index not in self.reasons
                self.reasons[index] = choice["finish_reason"]
            if choice["logprobs"]:
                self.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
        if event.get("usage"):
            self.usage = {
                name: event["usage"][name] for name in ("prompt_tokens", "completion_tokens")
            }


class Streams:
    """Requests that run at the same time, each with a client of its own."""

    def __init__(self, mesh: RunningMesh, bodies: list[dict[str, Any]]) -> None:
        self.answers = [Answer() for _ in bodies]
        self._mesh = mesh
        self._events = [0] * len(bodies)
        self._threads = [
            threading.Thread(target=self._read, args=(number, body), daemon=True)
            for number, body in enumerate(bodies)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int, body: dict[str, Any]) -> None:
        whole = {"model": MODEL, "max_tokens": TOKENS, "stream": True, "ignore_eos": True, **body}
        whole["stream_options"] = {"include_usage": True}
        with (
            self._mesh.another_client() as client,
            client.stream("POST", "/v1/completions", json=whole) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.answers[number].read(json.loads(line[6:]))
                    self._events[number] += 1

    def wait_under_way(self, events: int) -> None:
        """Until each stream has had so many events."""
        deadline = time.monotonic() + READY_SECONDS
        while min(self._events) < events:
            assert time.monotonic() < deadline, self._events
            time.sleep(0.005)

    def join(self) -> list[Answer]:
        for thread in self._threads:
            thread.join(READY_SECONDS)
            assert not thread.is_alive(), "a stream hangs"
        return self.answers


@dataclass
class Scene:
    """A mesh, what it is asked, and what that gives undisturbed."""

    mesh: RunningMesh
    bodies: list[dict[str, Any]]
    expected: list[Answer]


def stop_within(text: str) -> str:
    """A string that comes for the first time in the last third of a text."""
    for begin in range(2 * len(text) // 3, len(text) - 6):
        if text.index(text[begin : begin + 6]) == begin:
            return text[begin : begin + 6]
    raise AssertionError(f"{text!r} only repeats itself")


@pytest.fixture(scope="module")
def scene(model_dir: Path) -> Iterator[Scene]:
    with running_mesh(model_dir, "--dtype", "float32", "--hang-timeout", "6") as mesh:
        text = mesh.text(PROMPTS[1], max_tokens=TOKENS, ignore_eos=True)
        bodies: list[dict[str, Any]] = [
            *({"prompt": prompt, "temperature": 0} for prompt in PROMPTS),
            {"prompt": PROMPTS[1], "temperature": 0, "stop": stop_within(text)},
            {"prompt": PROMPTS[0], "temperature": 0.8, "seed": 7, "n": 2},
            {"prompt": PROMPTS[2], "temperature": 0, "logprobs": 2},
            {"prompt": PROMPTS[1], "temperature": 0.9, "seed": 11},
        ]
        expected = Streams(mesh, bodies).join()
        assert not any(answer.errors for answer in expected)
        assert [answer.reasons[0] for answer in expected].count("stop") == 1
        mesh.wait_idle()
        yield Scene(mesh, bodies, expected)


def wait_whole(mesh: RunningMesh, dead: list[psutil.Process]) -> None:
    """Until all processes have successors, and the mesh is ready with them."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        children = psutil.Process(mesh.process.pid).children()
        if len(children) == 5 and not any(process in children for process in dead):
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while mesh.client.get("/ready").status_code != 200:
        assert time.monotonic() < deadline, mesh.client.get("/ready").text
        time.sleep(0.1)


@pytest.mark.parametrize(
    "victims",
    [
        ["tokenizer"],
        ["scheduler"],
        ["detokenizer"],
        ["model-executor"],
        ["scheduler", "detokenizer"],
        ["model-executor", "detokenizer"],
        ["scheduler", "model-executor"],
    ],
    ids=" and ".join,
)
def test_streams_survive(scene: Scene, victims: list[str]) -> None:
    """R043: whoever is killed is started again."""
    streams = Streams(scene.mesh, scene.bodies)
    streams.wait_under_way(6)
    dead = [scene.mesh.child(f"{victim} 0") for victim in victims]
    for process in dead:
        process.kill()
    answers = streams.join()
    for answer, expected, body in zip(answers, scene.expected, scene.bodies, strict=True):
        assert answer == expected, body
    wait_whole(scene.mesh, dead)
    scene.mesh.wait_idle()
    lost = sum(scene.mesh.metric("headrace_recoveries_total", service=one) for one in victims)
    assert lost >= 1 or victims == ["tokenizer"], "nobody took care of it"


@pytest.mark.parametrize("victim", ["detokenizer 0", "model-executor 0"])
def test_streams_survive_a_process_that_hangs(scene: Scene, victim: str) -> None:
    """R043"""
    streams = Streams(scene.mesh, scene.bodies)
    streams.wait_under_way(6)
    process = scene.mesh.child(victim)
    process.suspend()
    assert streams.join() == scene.expected
    wait_whole(scene.mesh, [process])
    scene.mesh.wait_idle()


def test_health_tells_a_loss(scene: Scene) -> None:
    mesh = scene.mesh
    assert mesh.client.get("/health").status_code == 200
    executor = mesh.child("model-executor 0")
    executor.kill()
    deadline = time.monotonic() + 5
    while (health := mesh.client.get("/health")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert health.status_code == 503
    assert "model-executor" in health.text
    wait_whole(mesh, [executor])
    assert mesh.client.get("/health").status_code == 200


def test_requests_that_come_during_an_outage_wait(scene: Scene) -> None:
    mesh = scene.mesh
    dead = [mesh.child("scheduler 0"), mesh.child("tokenizer 0")]
    for process in dead:
        process.kill()
    streams = Streams(mesh, scene.bodies)
    asked = mesh.client.post("/tokenize", json={"prompt": "hi"})
    assert asked.status_code == 200
    assert streams.join() == scene.expected
    wait_whole(mesh, dead)
    mesh.wait_idle()

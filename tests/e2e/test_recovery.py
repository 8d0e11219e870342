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
TOLD_OF_LOSS = {
    "scheduler": "scheduler lost, another takes its requests",
    "detokenizer": "detokenizer lost, its requests go to another",
    "model-executor": "executor lost, its requests will be computed again",
}
UNDER_WAY = 4  # events; answers with calls of tools have few
PROMPTS = [
    "The history of the water mill begins",
    "Once upon a time, in a village by the river,",
    "A list of the largest lakes of the world:",
]

MESSAGES = [{"role": "user", "content": "What is the weather in Berlin like?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "the_name_of_the_city": {"type": "string", "maxLength": 12},
        "temperature_in_degrees": {"type": "integer", "minimum": 0, "maximum": 40},
        "chance_of_rain": {"enum": ["rather low", "rather high"]},
    },
    "required": ["the_name_of_the_city", "temperature_in_degrees", "chance_of_rain"],
    "additionalProperties": False,
}
STRUCTURED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}},
    "ignore_eos": False,
    "max_tokens": 80,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
CALLING = {
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "ignore_eos": False,
    "max_tokens": 80,
}


@dataclass
class Answer:
    """All that a client learns of one request."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    calls: dict[int, str] = field(default_factory=dict)  # of tools: names and arguments
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[Any]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict, compare=False)
    usage: dict[str, int] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)

    def read(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
        for choice in event.get("choices", []):
            index, delta = choice["index"], choice.get("delta", {})
            text = choice.get("text") or delta.get("content") or ""
            self.texts[index] = self.texts.get(index, "") + text
            for call in delta.get("tool_calls") or ():
                told = call["function"].get("name") or call["function"]["arguments"]
                self.calls[index] = self.calls.get(index, "") + told
            if choice["finish_reason"]:
                assert index not in self.reasons
                self.reasons[index] = choice["finish_reason"]
            if told := choice.get("logprobs"):
                self.tokens.setdefault(index, []).extend(told["tokens"])
                self.logprobs.setdefault(index, []).extend(told["token_logprobs"])
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
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        with (
            self._mesh.another_client() as client,
            client.stream("POST", path, json=whole) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.answers[number].read(json.loads(line[6:]))
                    self._events[number] += 1

    def wait_under_way(self) -> None:
        """Until each stream has had some events."""
        deadline = time.monotonic() + READY_SECONDS
        while min(self._events) < UNDER_WAY:
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
            {"prompt": PROMPTS[0], "temperature": 0, "echo": True, "logprobs": 0},
            {"messages": MESSAGES, "temperature": 0, **STRUCTURED},
            {"messages": MESSAGES, "temperature": 0, **CALLING},
        ]
        expected = Streams(mesh, bodies).join()
        assert not any(answer.errors for answer in expected)
        assert [answer.reasons[0] for answer in expected].count("stop") >= 2
        assert any(answer.calls for answer in expected)
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


def check(answers: list[Answer], scene: Scene) -> None:
    """Nothing of them shows that anybody died."""
    for answer, expected, body in zip(answers, scene.expected, scene.bodies, strict=True):
        assert answer == expected, body
        assert answer.logprobs.keys() == expected.logprobs.keys()
        for index, values in answer.logprobs.items():
            assert values == pytest.approx(expected.logprobs[index], abs=1e-3), body


def wait_unhealthy(mesh: RunningMesh, service: str) -> None:
    """Until the mesh says that it lacks this service."""
    deadline = time.monotonic() + READY_SECONDS
    while (health := mesh.client.get("/health")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert health.status_code == 503
    assert service in health.text


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
        ["tokenizer", "model-executor"],
    ],
    ids=" and ".join,
)
def test_streams_survive(scene: Scene, victims: list[str]) -> None:
    """R043: whoever is killed is started again."""
    mesh = scene.mesh
    assert mesh.client.get("/health").status_code == 200
    told = len(mesh.log.read_text())
    recovered = mesh.metric("headrace_recoveries_total", service="model-executor")
    streams = Streams(mesh, scene.bodies)
    streams.wait_under_way()
    dead = [mesh.child(f"{victim} 0") for victim in victims]
    for process in dead:
        process.kill()
    if victims == ["model-executor"]:
        wait_unhealthy(mesh, "model-executor")
    check(streams.join(), scene)
    wait_whole(mesh, dead)
    mesh.wait_idle()
    assert mesh.client.get("/health").status_code == 200
    lost = sum(mesh.metric("headrace_recoveries_total", service=one) for one in victims)
    assert lost >= 1 or victims == ["tokenizer"], "nobody took care of it"
    log = mesh.log.read_text()[told:]
    if victims == ["model-executor"]:
        assert lost == recovered + 1
    for victim in victims:
        deaths = [line for line in log.splitlines() if "service died" in line and victim in line]
        assert len(deaths) == 1
        assert "-9" in deaths[0]
    if len(victims) == 1 and victims[0] in TOLD_OF_LOSS:
        assert log.count(TOLD_OF_LOSS[victims[0]]) == 1


@pytest.mark.parametrize(
    "victims",
    [["scheduler"], ["detokenizer"], ["tokenizer", "model-executor"]],
    ids=" and ".join,
)
def test_streams_survive_a_process_that_hangs(scene: Scene, victims: list[str]) -> None:
    """R043"""
    streams = Streams(scene.mesh, scene.bodies)
    streams.wait_under_way()
    hung = [scene.mesh.child(f"{victim} 0") for victim in victims]
    for process in hung:
        process.suspend()
    check(streams.join(), scene)
    wait_whole(scene.mesh, hung)
    scene.mesh.wait_idle()


def test_requests_that_come_during_an_outage_wait(scene: Scene) -> None:
    mesh = scene.mesh
    embedded = mesh.post("/v1/embeddings", input="The mill").json()["data"][0]["embedding"]
    dead = [mesh.child("scheduler 0"), mesh.child("tokenizer 0")]
    for process in dead:
        process.kill()
    streams = Streams(mesh, scene.bodies)
    asked = mesh.client.post("/tokenize", json={"prompt": "hi"})
    assert asked.status_code == 200
    again = mesh.post("/v1/embeddings", input="The mill").json()["data"][0]["embedding"]
    assert again == pytest.approx(embedded, abs=1e-4)
    check(streams.join(), scene)
    wait_whole(mesh, dead)
    mesh.wait_idle()

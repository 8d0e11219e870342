"""Clients that chat with a mesh while it is disturbed, and what became of their requests.

Every answer is greedy, so it must be the one that the same question got from the undisturbed mesh.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from dataclasses import dataclass, field

import httpx

QUESTIONS = ("a water wheel", "a gear", "a river", "an engine", "a pump", "a turbine", "a mill")
PATIENCE = httpx.Timeout(120.0, connect=10.0)


@dataclass(frozen=True)
class Outcome:
    """`kind`: right, different, refused (with a status, before any text) or lost (in its midst)."""

    kind: str
    text: str  # the answer, or what went wrong


def ask(url: str, question: str, max_tokens: int) -> Outcome:
    """One streamed chat."""
    body = {
        "messages": [{"role": "user", "content": f"What is {question}?"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE
        ) as answer:
            if answer.status_code != 200:
                return Outcome("refused", f"{answer.status_code}: {_reason(answer.read())}")
            return _read(answer)
    except httpx.HTTPError as error:
        return Outcome("lost", f"{type(error).__name__}: {error}")


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError):
        return body.decode(errors="replace")[:100]


def _read(answer: httpx.Response) -> Outcome:
    text = ""
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            return Outcome("right", text)
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return Outcome("lost", event["error"]["message"])
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
    return Outcome("lost", f"ended without [DONE] after {text!r}")


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ("right", "different", "refused", "lost")
        told = ", ".join(f"{self.counts[kind]} {kind}" for kind in kinds if self.counts[kind])
        faults = "; ".join(f"{count} x {text}" for text, count in self.faults.most_common(3))
        return told + (f" ({faults})" if faults else "")


class Load:
    """`with Load(...) as load:` clients ask one question after another until the block ends."""

    def __init__(self, url: str, expected: dict[str, str], clients: int, max_tokens: int) -> None:
        self.tally = Tally()
        self._url, self._expected, self._max_tokens = url, expected, max_tokens
        self._questions = itertools.cycle(expected)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                question = next(self._questions)
            outcome = ask(self._url, question, self._max_tokens)
            different = outcome.kind == "right" and outcome.text != self._expected[question]
            kind = "different" if different else outcome.kind
            with self._lock:
                self.tally.counts[kind] += 1
                if kind != "right":
                    self.tally.faults[outcome.text[:160]] += 1
            if kind in ("refused", "lost"):
                self._ended.wait(0.5)  # as a client that backs off

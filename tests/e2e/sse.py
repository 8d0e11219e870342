"""Reading a server-sent event stream strictly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from tests.e2e.harness import MODEL, RunningMesh


@dataclass(frozen=True, slots=True)
class Streamed:
    """All events of one stream, and the texts of its first choice."""

    events: list[dict[str, Any]]
    pieces: list[str]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def finish_reason(self) -> str | None:
        reasons: list[str | None] = [
            choice["finish_reason"] for e in self.events for choice in e["choices"]
        ]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1]


def stream(mesh: RunningMesh, path: str = "/v1/completions", **body: Any) -> Streamed:
    """POST with `stream` and read to the end, checking the form of every line."""
    with mesh.client.stream("POST", path, json={"model": MODEL, **body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return read(answer)


def read(answer: httpx.Response) -> Streamed:
    assert answer.headers["content-type"].startswith("text/event-stream")
    raw = b"".join(answer.iter_raw())
    *lines, last, end = raw.decode("utf-8").split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    told = (line for line in lines if line != ": keep-alive")  # what a long silence is filled with
    events = [strict_json(line.removeprefix("data: ")) for line in told]
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices]
    return Streamed(events, pieces)


def strict_json(text: str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} in the answer")

    return json.loads(text, parse_constant=refuse)

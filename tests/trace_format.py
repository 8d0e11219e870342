"""Chrome's Trace Event Format, as far as Headrace writes it, and what can be read from it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jsonschema

ANY_NUMBER = {"type": "number"}
COUNTS = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}


def _event(phase: str, **fields: Any) -> dict[str, Any]:
    common = {"name": {"type": "string"}, "ph": {"const": phase}, "ts": ANY_NUMBER}
    common |= {"pid": {"type": "integer"}, "tid": {"type": "integer"}}
    properties = common | {"args": COUNTS} | fields
    return {"properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMA = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "oneOf": [
                    _event("X", dur={"type": "number", "exclusiveMinimum": 0}),
                    _event("i", s={"enum": ["g", "p", "t"]}),
                    _event(
                        "M",
                        name={"enum": ["process_name", "thread_name"]},
                        args={"properties": {"name": {"type": "string"}}, "required": ["name"]},
                    ),
                    _event(
                        "M",
                        name={"const": "process_sort_index"},
                        args={"properties": {"sort_index": {"type": "integer"}}},
                    ),
                ],
            },
        },
    },
}


@dataclass(frozen=True, slots=True)
class Shown:
    """An event as a viewer shows it; times in us."""

    name: str
    process: str
    thread: str
    began: float
    ended: float
    args: dict[str, int]


def shown(trace: Any) -> list[Shown]:
    """Check a trace, and return its events in the order of their beginning."""
    jsonschema.validate(trace, SCHEMA)
    events = trace["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    found = [
        Shown(
            name=event["name"],
            process=names["process_name", event["pid"], 0],
            thread=names["thread_name", event["pid"], event["tid"]],
            began=event["ts"],
            ended=event["ts"] + event.get("dur", 0),
            args=event["args"],
        )
        for event in events
        if event["ph"] != "M"
    ]
    found.sort(key=lambda event: event.began)
    _check_threads(found)
    return found


def _check_threads(events: list[Shown]) -> None:
    """A thread does one thing at a time."""
    ends: defaultdict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        if event.ended > event.began:
            assert event.began >= ends[event.process, event.thread] - 0.001, event
            ends[event.process, event.thread] = event.ended

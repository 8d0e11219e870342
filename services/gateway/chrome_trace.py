"""Events of many instances in Chrome's Trace Event Format, which ui.perfetto.dev shows.

Each instance is a process, and each thing that happens in it beside others a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.gather import Instance
from shared.trace import NONE, Event
from shared.types import ServiceName

LOOP = "event loop"
ORDER = (  # a token's way
    ServiceName.TOKENIZER,
    ServiceName.SCHEDULER,
    ServiceName.MODEL_EXECUTOR,
    ServiceName.DETOKENIZER,
    ServiceName.GATEWAY,
)
TRACKS = {"iteration": "compute", "encode": "threads"}  # what does not happen on the event loop
COUNTS = ("rows", "tokens")
OTHER_COUNTS = {"iteration": ("decode_rows", "prefill_tokens")}


def render(events: Mapping[Instance, Sequence[Event]], silent: Sequence[Instance]) -> bytes:
    """One event a line; `silent` names the instances that are missing."""
    lines = [
        json.dumps(entry)
        for pid, instance in enumerate(sorted(events, key=_place), 1)
        for entry in _process(pid, instance, events[instance])
    ]
    body = ",\n".join(lines)
    head = {
        "displayTimeUnit": "ms",
        "otherData": {"unanswered": [_title(instance) for instance in silent]},
    }
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{body}\n]}}\n'.encode()


def _place(instance: Instance) -> tuple[int, str]:
    service, name = instance
    return ORDER.index(service), name


def _title(instance: Instance) -> str:
    service, name = instance
    return f"{service} {name.removeprefix(f'{service}.')}"


def _process(pid: int, instance: Instance, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", pid, 0, name=_title(instance))
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    threads: dict[str, int] = {}
    lanes = Lanes()
    for event in sorted(events, key=lambda event: event.began):
        thread = lanes.of(event)
        if thread not in threads:
            threads[thread] = len(threads) + 1
            yield _metadata("thread_name", pid, threads[thread], name=thread)
        yield _entry(event, pid, threads[thread])


class Lanes:
    """Spans of one track that overlap are put beside each other: a thread can only nest them."""

    def __init__(self) -> None:
        self._ends: dict[str, list[int]] = {}  # of the last span of each lane

    def of(self, event: Event) -> str:
        """The name of an event's lane; events come in the order of their beginning."""
        track = TRACKS.get(event.name, LOOP)
        ends = self._ends.setdefault(track, [event.began])
        if event.began == event.ended:
            return track
        lane = next((lane for lane, end in enumerate(ends) if end <= event.began), len(ends))
        ends[lane : lane + 1] = [event.ended]
        return track if lane == 0 else f"{track} {lane + 1}"


def _entry(event: Event, pid: int, tid: int) -> dict[str, Any]:
    names = ("step", *OTHER_COUNTS.get(event.name, COUNTS))
    numbers = zip(names, (event.step, event.rows, event.tokens), strict=True)
    entry: dict[str, Any] = {
        "name": event.name,
        "pid": pid,
        "tid": tid,
        "ts": event.began / 1000,  # us
        "args": {name: number for name, number in numbers if number != NONE},
    }
    if event.began == event.ended:
        return entry | {"ph": "i", "s": "t"}  # an instant, of its thread
    return entry | {"ph": "X", "dur": (event.ended - event.began) / 1000}


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}

"""What this process did and when: its newest spans and instants, always noted.

Times are CLOCK_MONOTONIC in ns: one clock for all processes of a host, and not that of another
host. Only the event loop's thread notes; what another thread did is noted when the loop hears it.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

CAPACITY = 1 << 15  # events: a few MB; over a minute at 5 ms an iteration
NONE = -1  # of step, rows and tokens: it has no such number

_WIRE = struct.Struct("<6q")


def nanoseconds(seconds: float) -> int:
    """A time of `time.monotonic()` as one of this module."""
    return round(seconds * 1e9)


class Event(NamedTuple):
    """Something that happened; an instant ended when it began."""

    name: str
    began: int  # ns
    ended: int  # ns
    step: int
    rows: int
    tokens: int


class Trace:
    """Bounded: a new event replaces the oldest. Noting one takes a fraction of a microsecond."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        # Plain tuples: an Event takes twice as long to make.
        self._events: deque[tuple[str, int, int, int, int, int]] = deque(maxlen=capacity)

    def span(
        self, name: str, began: int, step: int = NONE, rows: int = NONE, tokens: int = NONE
    ) -> None:
        """Something that began at `began`, ns, and ends now."""
        self._events.append((name, began, time.monotonic_ns(), step, rows, tokens))

    def instant(self, name: str, step: int = NONE, rows: int = NONE, tokens: int = NONE) -> None:
        """Something that happens now."""
        now = time.monotonic_ns()
        self._events.append((name, now, now, step, rows, tokens))

    def note(
        self,
        name: str,
        began: int,
        ended: int,
        step: int = NONE,
        rows: int = NONE,
        tokens: int = NONE,
    ) -> None:
        """Something that is over."""
        self._events.append((name, began, ended, step, rows, tokens))

    def since(self, moment: int) -> list[Event]:
        """What ended at this time, ns, or later; in the order of noting, which is nearly that."""
        newest = takewhile(lambda event: event[2] >= moment, reversed(self._events))
        return [Event(*event) for event in newest][::-1]


def pack(events: Iterable[Event]) -> tuple[list[str], bytes]:
    """For the wire: the names, and six int64 an event, the first of which is its name's index."""
    indices: dict[str, int] = {}
    packed = b"".join(
        _WIRE.pack(indices.setdefault(name, len(indices)), *numbers) for name, *numbers in events
    )
    return list(indices), packed


def unpack(names: list[str], packed: bytes) -> Iterator[Event]:
    """The inverse; raises ValueError for what `pack` cannot have made."""
    if len(packed) % _WIRE.size:
        raise ValueError("no whole number of events")
    for index, *numbers in _WIRE.iter_unpack(packed):
        if not 0 <= index < len(names):
            raise ValueError(f"no name {index} among {len(names)}")
        yield Event(names[index], *numbers)

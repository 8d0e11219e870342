"""Who is admitted next, and where.

All wait in one queue until an executor has room, so nobody waits for one while another could take
him. He who is next goes where the longest part of his prompt is cached, else where most is free;
but not where much more runs than elsewhere: what all prompts begin with is soon cached everywhere.
Is the place to go to between two plans, he waits for its next one, unless another stands idle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from services.scheduler.draft import Draft
from services.scheduler.engine import Engine
from services.scheduler.planner import Waiting
from services.scheduler.sequence import Sequence

IMBALANCE = 4  # sequences that may run more where a prompt is cached, or half as many again
MAX_PASSED = 4  # sequences that wait for a plan to come, and let others by


class Place(NamedTuple):
    """An executor that has room for a sequence."""

    engine: Engine
    found: list[int]  # blocks that hold its beginning
    draft: Draft | None  # None: its next plan is not to be made now

    @property
    def cached(self) -> int:
        """Tokens."""
        return len(self.found) * self.engine.capacity.block_size


def invites(engine: Engine, waiting: Waiting) -> bool:
    """Whether anybody could come in there."""
    if not waiting or not engine.planner.has_room:
        return False
    sequence = waiting.first_of(engine.suits)
    return sequence is not None and engine.room_for(sequence) is not None


def admit(
    waiting: Waiting, engines: Collection[Engine], drafts: Mapping[Engine, Draft], now: float
) -> None:
    """Add those who come in to the drafts."""
    able = dict.fromkeys(engines)  # but not those that somebody waits for to have room
    passed: set[Sequence] = set()
    while len(passed) <= MAX_PASSED and waiting:
        takers = [one for one, draft in drafts.items() if draft.open and one in able]
        sequence = _first(waiting, takers, passed)
        if sequence is None:
            return
        places = _places(sequence, able, drafts, now)
        if not places:
            able = {engine: None for engine in able if not engine.suits(sequence)}
        elif (place := _choose(places)) is not None and place.draft is not None:
            place.engine.planner.admit(sequence, place.found, place.draft, waiting)
        else:
            passed.add(sequence)


def _first(
    waiting: Waiting, takers: Collection[Engine], passed: Collection[Sequence]
) -> Sequence | None:
    """The next whom one of these could take."""

    def could_come(sequence: Sequence) -> bool:
        return sequence not in passed and any(engine.suits(sequence) for engine in takers)

    return waiting.first_of(could_come) if takers else None


def _places(
    sequence: Sequence, engines: Collection[Engine], drafts: Mapping[Engine, Draft], now: float
) -> list[Place]:
    """Where it could go, now or soon."""
    places = []
    for engine in engines:
        draft = drafts.get(engine)
        soon = draft.open if draft is not None else engine.soon_ready(now)
        if soon and engine.suits(sequence) and (found := engine.room_for(sequence)) is not None:
            places.append(Place(engine, found, draft))
    return places


def _choose(places: list[Place]) -> Place | None:
    """Where to go; None if that is not there yet."""
    if len(places) == 1:
        return places[0]
    least = min(len(place.engine.running) for place in places)
    most = least + max(IMBALANCE, least // 2)
    near = [place for place in places if len(place.engine.running) <= most]
    place = max(near, key=_merit)
    if place.draft is None and not least:
        idle = [one for one in near if one.draft is not None and not one.engine.running]
        place = max(idle, key=_merit, default=place)
    return place


def _merit(place: Place) -> tuple[int, bool, float]:
    return place.cached, place.draft is not None, -place.engine.planner.load

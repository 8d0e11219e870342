"""Stop strings in a text that comes in pieces: found wherever they lie, never half of one sent."""

from __future__ import annotations

import re
from collections.abc import Iterable


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton."""

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = _borders(text)

    def advance(self, state: int, text: str, armed: bool) -> tuple[int, int]:
        """Read `text` with `state` characters matched before it.

        Returns the new state and the end of the first match in `text`, or 0 if there is none. A
        match while not `armed` does not count, but its end may begin another.
        """
        pattern, borders = self.text, self._borders
        place, size = 0, len(pattern)
        while place < len(text):
            if state == 0:
                place = text.find(pattern[0], place)
                if place < 0:
                    break
                state = 1
            else:
                character = text[place]
                while state and pattern[state] != character:
                    state = borders[state]
                state += pattern[state] == character
            place += 1
            if state == size:
                if armed:
                    return state, place
                state = borders[state]
        return state, 0


def _borders(pattern: str) -> list[int]:
    """For each length, the longest proper prefix of that part which is also its end."""
    borders = [0, 0]
    for character in pattern[1:]:
        state = borders[-1]
        while state and pattern[state] != character:
            state = borders[state]
        borders.append(state + (pattern[state] == character))
    return borders


class StopMatcher:
    """Watches one text for several stop strings; takes time linear in its length.

    The match that ends first counts; of those that end together, the longest. So what is found
    does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_beginning", "_held", "_include", "_patterns", "_states")

    def __init__(self, stops: Iterable[str], *, include: bool) -> None:
        """`include`: the stop string belongs to the text."""
        self._patterns = [_Pattern(stop) for stop in stops if stop]
        self._states = [0] * len(self._patterns)
        self._held = ""  # the end of the text, as long as the longest of `_states`
        firsts = "".join(re.escape(pattern.text[0]) for pattern in self._patterns)
        self._beginning = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._include = include

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """The text that can be sent now, and the stop string at its end if one was found."""
        if not self._held and self._beginning.search(text) is None:
            return text, None  # the usual case
        found: tuple[int, int, str] | None = None  # end in `text`, minus the length, stop string
        for place, pattern in enumerate(self._patterns):
            state = self._states[place]
            if state == 0 and pattern.text[0] not in text:
                continue
            self._states[place], end = pattern.advance(state, text, armed)
            if end and (found is None or (end, -len(pattern.text)) < found[:2]):
                found = (end, -len(pattern.text), pattern.text)
        whole = self._held + text
        if found is not None:
            end, size, stop = found
            cut = len(self._held) + end + (0 if self._include else size)
            return whole[:cut], stop
        safe = len(whole) - max(self._states, default=0)
        self._held = whole[safe:]
        return whole[:safe], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

"""Reading a text that comes in pieces, by code that looks as if it were all there.

Such code is a generator: it yields when it needs more, and goes on when there is. It decides only
by what more text cannot change, so how the text was cut makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

Value = TypeVar("Value")
Reading: TypeAlias = Generator[None, None, Value]  # yields while it waits, returns what it read

MAX_SPACE = 64  # characters of white space before a mark that are taken as part of it
_SPACE = re.compile(r"\s+")


class Reader:
    """What has come and is not read yet; what was read is recorded until it is accounted for."""

    __slots__ = ("_at", "_record", "_text", "ended")

    def __init__(self) -> None:
        self.ended = False  # nothing more comes
        self._text = ""
        self._at = 0
        self._record: list[str] = []

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def exhausted(self) -> bool:
        return self._at == len(self._text)

    @property
    def peek(self) -> str:
        """The next character, which is there."""
        return self._text[self._at]

    def rest(self) -> str:
        """Read all that there is."""
        return self.take(len(self._text) - self._at)

    def is_begun(self, text: str) -> bool:
        """Whether all that is unread is a beginning of this text, and not nothing."""
        size = len(self._text) - self._at
        return 0 < size < len(text) and self._text.endswith(text[:size])

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """At the place where reading goes on."""
        return pattern.match(self._text, self._at)

    def full_match(self, pattern: re.Pattern[str]) -> bool:
        """Whether all that is unread fits."""
        return pattern.fullmatch(self._text, self._at) is not None

    def take(self, size: int) -> str:
        """Read so many characters."""
        text = self._text[self._at : self._at + size]
        self._at += len(text)
        self._record.append(text)
        return text

    def settle(self) -> str:
        """The record, which begins anew: what was read has become something."""
        text = "".join(self._record)
        self._record.clear()
        return text

    # --- waiting

    def some(self) -> Reading[bool]:
        """Wait for a character; false at the end."""
        while self.exhausted and not self.ended:
            yield
        return not self.exhausted

    def literal(self, text: str) -> Reading[bool]:
        """Read exactly this text, if it is next."""
        while True:
            if self._text.startswith(text, self._at):
                self.take(len(text))
                return True
            if self.ended or not (self.exhausted or self.is_begun(text)):
                return False
            yield

    def space(self) -> Reading[str]:
        """Read white space; all of it that there is."""
        found = []
        while (yield from self.some()) and (space := self.match(_SPACE)):
            found.append(self.take(len(space[0])))
        return "".join(found)

    def run(self, pattern: re.Pattern[str], limit: int) -> Reading[str]:
        """What is next and fits a pattern that is a run of characters, without reading it.

        It is longer than `limit` if it is too long, by how much cannot be said.
        """
        while True:
            found = self.match(pattern)
            size = len(found[0]) if found else 0
            if self.ended or size > limit or self._at + size < len(self._text):
                return found[0] if found else ""
            yield

    def until(self, mark: str) -> tuple[str, bool]:
        """Read what comes before the mark, as far as it is there; then the mark itself.

        Returns what was read, without the white space before the mark, and whether the mark was
        found. What may become the mark, or space before it, stays unread.
        """
        place = self._text.find(mark, self._at)
        found = place >= 0
        end = place if found else len(self._text) - self._begun(mark)
        cut = self._before_space(end)
        before = self._text[self._at : cut]
        if found:
            self._at = cut
            self.take(place + len(mark) - cut)
        elif self.ended:
            before = self._text[self._at :]
            self._at = len(self._text)
        else:
            self._at = cut
        return before, found

    def _before_space(self, end: int) -> int:
        start = max(self._at, end - MAX_SPACE)
        return start + len(self._text[start:end].rstrip())

    def _begun(self, mark: str) -> int:
        """How much of the mark the text ends with."""
        longest = min(len(mark) - 1, len(self._text) - self._at)
        for size in range(longest, 0, -1):
            if self._text.endswith(mark[:size]):
                return size
        return 0

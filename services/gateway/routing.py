"""Which instance gets a request: decided once, by the gateway."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from shared.messages import Prompt
from shared.types import RequestId


class Outstanding:
    """Work that was sent to each tokenizer and is not answered yet."""

    def __init__(self) -> None:
        self._work: dict[str, int] = {}
        self._turns: dict[str, int] = {}  # when each got work last, as a number of its turn
        self._turn = 0

    def choose(self, names: Sequence[str]) -> str | None:
        """The one with the least to do; among equals, as when all are idle, they take turns."""
        return min(
            names,
            key=lambda name: (self._work.get(name, 0), self._turns.get(name, 0)),
            default=None,
        )

    def add(self, name: str, work: int) -> None:
        self._work[name] = self._work.get(name, 0) + work
        self._turn += 1
        self._turns[name] = self._turn

    def done(self, name: str, work: int) -> None:
        left = self._work.get(name, 0) - work
        if left > 0:
            self._work[name] = left
        else:
            self._work.pop(name, None)

    def forget(self, name: str) -> None:
        """A new life of this instance starts with nothing."""
        self._work.pop(name, None)
        self._turns.pop(name, None)


def work_of(prompt: Prompt) -> int:
    """About how much there is to tokenize, in characters."""
    return 1 + len(prompt.text or "") + len(prompt.chat or "")


def detokenizer_of(request_id: RequestId, names: Sequence[str]) -> str | None:
    """The shard of a request among the live ones (sorted names)."""
    return names[zlib.crc32(request_id.encode()) % len(names)] if names else None

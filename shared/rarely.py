"""Lines of a log that others could cause at any rate: of each kind one in a while, with a count."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import structlog

QUIET_SECONDS = 10.0  # between two lines of a kind


class Rarely:
    """Each line says how many times it was meant, this one included."""

    def __init__(self, logger: str) -> None:
        self._log = structlog.get_logger(logger)
        self._times: Counter[str] = Counter()  # since the last line of its kind
        self._quiet_until: dict[str, float] = {}

    def warning(self, event: str, kind: str = "", **details: Any) -> None:
        """`kind`: one of few, never a stranger's to choose; `details` may be anything."""
        now = time.monotonic()
        key = f"{event}/{kind}"
        self._times[key] += 1
        if now >= self._quiet_until.get(key, now):
            self._log.warning(event, **details, times=self._times.pop(key))
            self._quiet_until[key] = now + QUIET_SECONDS

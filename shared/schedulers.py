"""Whom to give a request to, of several schedulers: prompts that begin alike go to the same one."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from shared.messages import Credit
from shared.types import Int32s, int32s_to_bytes

AFFINITY_TOKENS = 32  # of a prompt: those that begin with the same ones go together
IMBALANCE = 0.25  # of a scheduler's slots: so much fuller than another it may be for that


class Schedulers:
    """What they said last, and what they were given since."""

    def __init__(self) -> None:
        self._credits: dict[str, Credit] = {}
        self._given: dict[str, int] = {}  # requests, not counted in the credit

    def credit(self, name: str, credit: Credit) -> None:
        self._credits[name] = credit
        self._given.pop(name, None)

    def forget(self, name: str) -> None:
        self._credits.pop(name, None)
        self._given.pop(name, None)

    def able(self, names: Sequence[str]) -> list[str]:
        """Those of them that have executors."""
        return [name for name in names if self._slots(name)]

    def choose(self, names: Sequence[str], token_ids: Int32s, cache_salt: str) -> str | None:
        """One of these that has executors, if there is any; it is taken to get the request."""
        able = self.able(names) or names
        if not able:
            return None
        key = int32s_to_bytes(token_ids[:AFFINITY_TOKENS]) + cache_salt.encode(errors="replace")
        chosen = max(able, key=lambda name: blake2b(key + name.encode(), digest_size=8).digest())
        least = min(able, key=self._load)
        if self._load(chosen) > self._load(least) + IMBALANCE:
            chosen = least
        self._given[chosen] = self._given.get(chosen, 0) + 1
        return chosen

    def _slots(self, name: str) -> int:
        credit = self._credits.get(name)
        return credit.max_num_seqs if credit is not None else 0

    def _load(self, name: str) -> float:
        """Requests for each slot: above 1, some wait."""
        given, credit = self._given.get(name, 0), self._credits.get(name)
        if credit is None:
            return float(given)
        return (credit.running + credit.waiting + given) / max(1, credit.max_num_seqs)

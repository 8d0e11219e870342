"""How many prompt tokens an iteration may compute beside decodes, so that streams keep their pace.

Streams get a token an iteration, so a long prompt read in large chunks slows all of them down. An
iteration with prompt tokens may therefore take at most `max_slowdown` times as long as one that
only decodes. Only where more sequences wait for their first token than decode, the many count for
more than the few: the time for prompts grows by the proportion. What iterations take is learnt from
the times between results: it depends on the model, the machine, the number of sequences and their
lengths, and changes as the prompt is read.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from shared.messages import NEWEST, Plan

KEPT_DECODES = 3  # newest durations, of which the median counts: a hiccup is no pace
KEPT_CHUNKS = 8
GROWTH = 2  # of what was measured, the cost of so many times as much is believed
MAX_AGE = 32  # chunks beside as many decodes; then an iteration only decodes, to be measured
SMALLEST_CHUNK = 1 / 32  # of the token budget: however slow prompts are, they are read


@dataclass(slots=True)
class _Sent:
    step: int
    at: float  # seconds
    decodes: int  # rows
    tokens: int  # of prompts


@dataclass(frozen=True, slots=True)
class _Chunk:
    tokens: int
    seconds: float  # beyond those of the decodes beside it


class _Decodes:
    """Iterations that only decode, of about as many rows."""

    __slots__ = ("age", "durations")

    def __init__(self) -> None:
        self.durations: deque[float] = deque(maxlen=KEPT_DECODES)  # seconds
        self.age = MAX_AGE  # chunks planned beside so many decodes since the newest

    @property
    def seconds(self) -> float | None:
        return median(self.durations) if self.durations else None


class Pace:
    """Fed with the plans sent to one executor and with their results, in order."""

    def __init__(self, max_slowdown: float, token_budget: int) -> None:
        self._max_slowdown = max_slowdown
        self._smallest = math.ceil(token_budget * SMALLEST_CHUNK)
        self._sent: deque[_Sent] = deque()
        self._heard = 0.0  # when the newest result came
        self._decodes: dict[int, _Decodes] = {}  # by the rows, as `_alike` rounds them
        self._chunks: deque[_Chunk] = deque(maxlen=KEPT_CHUNKS)

    def allowance(self, budget: int, decodes: int, unread: int) -> int:
        """How many of `budget` prompt tokens the next iteration may compute beside its decodes.

        unread: sequences that could take part, and wait for their first token.
        """
        if not decodes or math.isinf(self._max_slowdown):
            return budget
        alike = self._alike(decodes)
        if alike.age >= MAX_AGE:
            return 0
        share = max(1.0, unread / decodes)
        return min(budget, max(self._smallest, self._affordable(alike.seconds, share)))

    def sent(self, plan: Plan, now: float) -> None:
        """A plan is on its way; `now` in seconds."""
        decodes = plan.row_starts.count(NEWEST)
        tokens = sum(plan.row_tokens) - decodes
        self._sent.append(_Sent(plan.step, now, decodes, tokens))
        if decodes:
            alike = self._alike(decodes)
            alike.age = alike.age + 1 if tokens else 0

    def heard(self, step: int, now: float) -> None:
        """A result of a plan under way came, of its first iteration or of one under its lease."""
        while self._sent[0].step < step:
            self._sent.popleft()
        plan = self._sent[0]
        seconds = now - max(self._heard, plan.at)
        self._heard = now
        if not plan.decodes:
            return
        alike = self._alike(plan.decodes)
        if not plan.tokens:
            alike.durations.append(seconds)
        elif alike.seconds is not None:
            self._chunks.append(_Chunk(plan.tokens, seconds - alike.seconds))

    def _alike(self, decodes: int) -> _Decodes:
        """What is known of iterations with so many rows, by their three leading binary digits."""
        rounding = max(0, decodes.bit_length() - 3)
        return self._decodes.setdefault(decodes >> rounding << rounding, _Decodes())

    def _affordable(self, decode_seconds: float | None, share: float) -> int:
        """Prompt tokens in `share` of the time that they may take, as far as that is known."""
        if decode_seconds is None or not self._chunks:
            return 0
        tokens = sum(chunk.tokens for chunk in self._chunks)
        per_token = sum(chunk.seconds for chunk in self._chunks) / tokens
        most = GROWTH * max(chunk.tokens for chunk in self._chunks)
        seconds = share * (self._max_slowdown - 1) * decode_seconds
        return int(min(most, seconds / per_token)) if per_token > 0 else most

"""What requests want to be told beside their tokens, by slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.sampling import SamplingParams

Ints = NDArray[np.int64]

NOTHING = -1


class PromptRun(NamedTuple):
    """Consecutive tokens of a row after which prompt tokens come that are to be told of."""

    row: int
    slot: int
    first: int  # the position of the first that is told of: at least 1
    length: int  # tokens
    alternatives: int  # to each


class Wishes:
    """Columns with one entry for each slot."""

    def __init__(self, slots: int) -> None:
        self.logprobs = np.full(slots, NOTHING, np.int64)  # alternatives to each sampled token
        self._prompt_logprobs = np.full(slots, NOTHING, np.int64)  # and to each of the prompt
        self._prompt_tokens = np.zeros(slots, np.int64)
        self._embed = np.zeros(slots, np.bool_)
        self._any = np.zeros(slots, np.bool_)

    def enter(self, slot: int, params: SamplingParams, prompt_tokens: int) -> None:
        """A sequence takes the slot."""
        self.logprobs[slot] = NOTHING if params.logprobs is None else params.logprobs
        prompt = params.prompt_logprobs
        self._prompt_logprobs[slot] = NOTHING if prompt is None else prompt
        self._prompt_tokens[slot] = prompt_tokens
        self._embed[slot] = params.embed
        told = params.logprobs is not None or prompt is not None
        self._any[slot] = told or params.embed

    def any(self, slots: Ints) -> bool:
        """Whether one of these wants anything."""
        return bool(self._any[slots].any())

    def sampled(self, slots: Ints) -> Ints:
        """Which of these rows want the logprobs of what they sample."""
        return np.flatnonzero(self.logprobs[slots] != NOTHING)

    def embedded(self, slots: Ints, positions: Ints) -> Ints:
        """Which of these rows, that sample, have come to the end of a prompt to be embedded."""
        return np.flatnonzero(self._embed[slots] & (positions == self._prompt_tokens[slots]))

    def prompts(self, slots: Ints, starts: Ints, counts: Ints) -> list[PromptRun]:
        """Where these rows compute what is to be told of their prompts' tokens."""
        ends = np.minimum(starts + counts, self._prompt_tokens[slots] - 1)
        wanted = (self._prompt_logprobs[slots] != NOTHING) & (ends > starts)
        return [
            PromptRun(
                row=row,
                slot=int(slots[row]),
                first=int(starts[row]) + 1,
                length=int(ends[row] - starts[row]),
                alternatives=int(self._prompt_logprobs[slots[row]]),
            )
            for row in np.flatnonzero(wanted).tolist()
        ]

"""What requests want done to their logits before a token is chosen, by slot.

In vLLM's order: bias, penalties, then what must not come. All that depends on a sequence's tokens
is made from these each time, so run-ahead, leases and preemption leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.avoided_words import Words, avoid_words
from kernels.penalties import Penalized, penalize
from services.model_executor.finish import StopRules
from shared.sampling import SamplingParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

ALWAYS = 1 << 62  # a position that is never reached


class WordIds(NamedTuple):
    """Words as columns: the ids before the last, at the right end, with -1 before them."""

    firsts: Ints  # [words, any]
    lasts: Ints  # [words]

    @classmethod
    def of(cls, words: Iterable[Iterable[int]], vocab_size: int) -> WordIds:
        """A word with an id outside the vocabulary is left out: it cannot come."""
        made = [list(word) for word in words]
        made = [word for word in made if word and min(word) >= 0 and max(word) < vocab_size]
        firsts = np.full((len(made), max(map(len, made), default=1) - 1), -1, np.int64)
        for index, word in enumerate(made):
            firsts[index, firsts.shape[1] + 1 - len(word) :] = word[:-1]
        return cls(firsts, np.array([word[-1] for word in made], np.int64))

    def padded(self, width: int) -> Ints:
        added = ((0, 0), (width - self.firsts.shape[1], 0))
        return np.pad(self.firsts, added, constant_values=-1)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One request's part."""

    prompt_tokens: int
    first_end: int  # before this position `ends` are avoided
    ends: WordIds
    bad_words: WordIds
    biased: Ints  # token ids
    bias: Floats
    penalties: tuple[float, float, float] | None  # repetition, frequency, presence
    forbidden: Tensor | None  # bool [vocabulary]

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_tokens: int,
        rules: StopRules,
        vocab_size: int,
        device: torch.device,
    ) -> Adjustment:
        bias = [one for one in params.logit_bias if 0 <= one.token_id < vocab_size]
        forbidden = None
        if params.allowed_token_ids:
            forbidden = torch.ones(vocab_size, dtype=torch.bool)
            allowed = [token for token in params.allowed_token_ids if 0 <= token < vocab_size]
            forbidden[allowed] = False
            forbidden = forbidden.to(device)
        return cls(
            prompt_tokens=prompt_tokens,
            first_end=rules.first_end,
            ends=WordIds.of(([token] for token in sorted(rules.end_ids)), vocab_size),
            bad_words=WordIds.of(params.bad_word_ids, vocab_size),
            biased=np.array([one.token_id for one in bias], np.int64),
            bias=np.array([one.value for one in bias], np.float32),
            penalties=_penalties(params),
            forbidden=forbidden,
        )


class _Row(NamedTuple):
    """A row that is adjusted: its line among the logits, and its sequence."""

    line: int
    slot: int
    position: int  # of the token to come
    own: Adjustment

    @property
    def words(self) -> list[WordIds]:
        held = self.position < self.own.first_end
        return [self.own.bad_words, self.own.ends] if held else [self.own.bad_words]


class Adjustments:
    """The adjustments of all slots; rows that want none cost nothing."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._until = np.zeros(slots, np.int64)  # before this position there is something to do
        self._own: dict[int, Adjustment] = {}  # of slots that want any, or wanted some

    def enter(
        self, slot: int, params: SamplingParams, prompt_tokens: int, rules: StopRules
    ) -> None:
        """A sequence takes the slot."""
        self._until[slot] = until = ALWAYS if _lasting(params) else rules.first_end
        self._own.pop(slot, None)
        if until > prompt_tokens:
            own = Adjustment.of(params, prompt_tokens, rules, self._vocab_size, self._device)
            self._own[slot] = own

    def apply(self, logits: Tensor, tokens: Tensor, slots: Ints, positions: Ints) -> Tensor:
        """The logits to choose from; those given may be changed.

        logits: [rows, vocabulary]; tokens: ids, int32 [slots, any]; slots and positions: of the
        tokens to come, one for each row.
        """
        touched = np.flatnonzero(positions < self._until[slots])
        if not len(touched):
            return logits
        rows = [
            _Row(int(index), int(slots[index]), int(positions[index]), self._own[slots[index]])
            for index in touched
        ]
        biased = [row for row in rows if len(row.own.biased)]
        penalized = [row for row in rows if row.own.penalties is not None]
        if biased or penalized:
            logits = logits.float()
        if biased:
            self._add_bias(logits, biased)
        if penalized:
            self._penalize(logits, tokens, penalized)
        self._avoid(logits, tokens, rows)
        for row in rows:
            if row.own.forbidden is not None:
                logits[row.line].masked_fill_(row.own.forbidden, float("-inf"))
        return logits

    def _add_bias(self, logits: Tensor, rows: list[_Row]) -> None:
        lengths = [len(row.own.biased) for row in rows]
        indices = self._upload(np.repeat([row.line for row in rows], lengths))
        ids = self._upload(np.concatenate([row.own.biased for row in rows]))
        bias = self._upload(np.concatenate([row.own.bias for row in rows]))
        logits.index_put_((indices, ids), bias, accumulate=True)

    def _penalize(self, logits: Tensor, tokens: Tensor, rows: list[_Row]) -> None:
        columns = np.array([(r.line, r.slot, r.own.prompt_tokens, r.position) for r in rows])
        penalties = np.array([row.own.penalties for row in rows], np.float32)
        penalized = Penalized(*self._upload(columns.T.copy()), *self._upload(penalties.T.copy()))
        penalize(logits, tokens, penalized, max(row.position for row in rows))

    def _avoid(self, logits: Tensor, tokens: Tensor, rows: list[_Row]) -> None:
        words = [(row, one) for row in rows for one in row.words if len(one.lasts)]
        if not words:
            return
        width = max(one.firsts.shape[1] for _, one in words)
        lengths = [len(one.lasts) for _, one in words]
        columns = np.array([(row.line, row.slot, row.position) for row, _ in words])
        firsts = np.concatenate([one.padded(width) for _, one in words])
        lasts = np.concatenate([one.lasts for _, one in words])
        lines, slots, ends = self._upload(np.repeat(columns, lengths, axis=0)).T
        firsts_and_lasts = self._upload(firsts), self._upload(lasts)
        avoid_words(logits, tokens, Words(lines, slots, ends, *firsts_and_lasts))

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _penalties(params: SamplingParams) -> tuple[float, float, float] | None:
    made = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return None if made == (1.0, 0.0, 0.0) else made


def _lasting(params: SamplingParams) -> bool:
    """Whether it wants something for all of its tokens."""
    lists = params.logit_bias or params.allowed_token_ids or params.bad_word_ids
    return bool(lists) or _penalties(params) is not None

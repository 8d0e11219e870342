"""Penalties for tokens that a sequence has already, as vLLM defines them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

CHUNK_NUMBERS = 1 << 22  # counts held at once


@dataclass(frozen=True, slots=True)
class Penalized:
    """Rows to be penalized, one entry of each column for a row; all on the logits' device."""

    rows: Tensor  # int64, of the logits
    slots: Tensor  # int64, of the table of tokens
    prompts: Tensor  # int64: tokens before this position are prompt
    ends: Tensor  # int64: of the token to come; at least 1
    repetition: Tensor  # float32, for tokens of prompt and output; 1: none
    frequency: Tensor  # float32, for each time that a token is in the output
    presence: Tensor  # float32, for tokens of the output

    def part(self, begin: int, end: int) -> Penalized:
        return Penalized(*(getattr(self, column.name)[begin:end] for column in fields(self)))


def penalize(logits: Tensor, tokens: Tensor, penalized: Penalized, longest: int) -> None:
    """Penalize rows of `logits` in place.

    logits: float32 [rows, vocabulary]; tokens: ids, int32 [slots, any]; longest: the greatest end.
    Tokens are counted anew each time, so nothing has to be kept in step with them.
    """
    count = max(1, CHUNK_NUMBERS // max(logits.shape[1], longest))
    for begin in range(0, len(penalized.rows), count):
        _penalize(logits, tokens, penalized.part(begin, begin + count), longest)


def _penalize(logits: Tensor, tokens: Tensor, some: Penalized, longest: int) -> None:
    positions = torch.arange(longest, device=logits.device)
    ends = some.ends[:, None]
    # What is beyond the end repeats the last token: to write the same value twice does no harm.
    ids = tokens[some.slots[:, None], torch.minimum(positions, ends - 1)].long()
    generated = (positions >= some.prompts[:, None]) & (positions < ends)
    counts = torch.zeros(len(ids), logits.shape[1], dtype=torch.int32, device=logits.device)
    times = counts.scatter_add_(1, ids, generated.int()).gather(1, ids)
    rows = some.rows[:, None]
    values, repetition = logits[rows, ids], some.repetition[:, None]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= some.frequency[:, None] * times
    values -= some.presence[:, None] * (times > 0)
    logits[rows, ids] = values

"""Words that are not to come: runs of tokens of which the last is avoided after the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Never chosen beside another token, and still a number: where all are avoided, one must be taken.
AVOIDED = -1e15


@dataclass(frozen=True, slots=True)
class Words:
    """Words, each for one row; all on the logits' device."""

    rows: Tensor  # int64 [words], of the logits
    slots: Tensor  # int64 [words], of the table of tokens
    ends: Tensor  # int64 [words]: the position of the token to come
    firsts: (
        Tensor  # int64 [words, any]: the ids before the last, at the right end; -1: any, or none
    )
    lasts: Tensor  # int64 [words]


def avoid_words(logits: Tensor, tokens: Tensor, words: Words) -> None:
    """Keep words from being completed, in place.

    logits: [rows, vocabulary], any float type but float16; tokens: ids, int32 [slots, any].
    """
    width = words.firsts.shape[1]
    columns = words.ends[:, None] + torch.arange(-width, 0, device=logits.device)
    before = tokens[words.slots[:, None], columns.clamp(min=0)]
    same = (before == words.firsts) & (columns >= 0)
    begun = (same | (words.firsts < 0)).all(-1)
    rows, lasts = words.rows[begun], words.lasts[begun]
    logits[rows, lasts] = logits[rows, lasts].clamp(max=AVOIDED)  # what is forbidden remains so

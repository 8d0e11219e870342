"""What a model thinks of tokens: logarithms of probabilities, and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_NUMBERS = 1 << 22  # logits handled at once
LEAST = -9999.0  # what is impossible, as a number


class TokenLogprobs(NamedTuple):
    """Of some tokens: each itself first, then the likeliest in its place in falling order."""

    ranks: Tensor  # int64 [tokens]; the likeliest has 1
    ids: Tensor  # int64 [tokens, 1 + count]
    values: Tensor  # float32 [tokens, 1 + count], finite


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TokenLogprobs:
    """Of each row's token, and of the `count` likeliest there; fewer if there are not so many.

    logits: [rows, vocabulary], any float type; tokens: int64 [rows], ids.
    """
    count = min(count, logits.shape[1])
    rows = max(1, CHUNK_NUMBERS // logits.shape[1])
    parts = [
        _token_logprobs(logits[at : at + rows].float(), tokens[at : at + rows, None], count)
        for at in range(0, max(1, len(logits)), rows)
    ]
    return TokenLogprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TokenLogprobs:
    own = logits.gather(1, tokens)
    ranks = (logits > own).sum(-1) + 1
    best, ids = logits.topk(count)
    values = torch.cat([own, best], 1) - logits.logsumexp(-1, keepdim=True)
    values = values.nan_to_num_(nan=LEAST, neginf=LEAST).clamp_(LEAST, 0.0)
    return TokenLogprobs(ranks, torch.cat([tokens, ids], 1), values)

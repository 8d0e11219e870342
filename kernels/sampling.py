"""Choosing the next token: a function of (logits, parameters, seed, position) and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.noise import log_uniforms, row_keys

CHUNK_NUMBERS = 1 << 18  # logits handled at once: what a core's cache holds
BEST = 128  # tokens sorted at once: as a rule top_k and top_p keep fewer


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of many rows, one array each. `top_k` 0 and `top_p` 1 are no limit."""

    greedy: NDArray[np.bool_]
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    seed: NDArray[np.int64]

    @classmethod
    def zeros(cls, rows: int) -> SamplingColumns:
        return cls(
            greedy=np.zeros(rows, np.bool_),
            temperature=np.zeros(rows, np.float32),
            top_p=np.zeros(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int64),
            seed=np.zeros(rows, np.int64),
        )

    def take(self, rows: NDArray[np.int64]) -> SamplingColumns:
        return SamplingColumns(*(getattr(self, column.name)[rows] for column in fields(self)))


def sample(logits: Tensor, columns: SamplingColumns, positions: NDArray[np.int64]) -> Tensor:
    """The chosen token ids, int64 [rows].

    logits: [rows, vocabulary], any float type; -inf forbids a token. positions: of the token to
    come, in its sequence. A draw is a race of exponential variables: the token with the least
    E / probability wins. Filters apply as in vLLM: temperature, min_p, top_k, top_p; tokens that
    tie with the last one kept are kept. A row of NaN gets some id of the vocabulary.
    """
    if columns.greedy.all():
        return logits.argmax(-1)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    greedy = np.flatnonzero(columns.greedy)
    if len(greedy):
        rows = torch.from_numpy(greedy).to(logits.device)
        tokens[rows] = logits.index_select(0, rows).argmax(-1)
    sorting = (columns.top_p < 1) | (columns.top_k > 0)
    per_chunk = max(1, CHUNK_NUMBERS // logits.shape[1])
    for some, draw in ((~columns.greedy & ~sorting, _draw), (~columns.greedy & sorting, _draw_top)):
        indices = np.flatnonzero(some)
        for at in range(0, len(indices), per_chunk):
            chosen = indices[at : at + per_chunk]
            rows = torch.from_numpy(chosen).to(logits.device)
            tokens[rows] = draw(
                logits.index_select(0, rows).float(), _Rows(columns, positions, chosen, logits)
            )
    return tokens


class _Rows:
    """The parameters of some rows, on the logits' device."""

    def __init__(
        self,
        columns: SamplingColumns,
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
        logits: Tensor,
    ) -> None:
        mine = columns.take(rows)
        device = logits.device
        self.temperature = torch.from_numpy(mine.temperature).to(device)[:, None]
        self.any_min_p = bool(mine.min_p.any())
        self.log_min_p = torch.from_numpy(mine.min_p).to(device)[:, None].log()  # of 0: -inf
        # The running sum may round to 1 before the last token: no limit must be none.
        top_p = np.where(mine.top_p < 1, mine.top_p, np.float32(np.inf))
        self.top_p = torch.from_numpy(top_p).to(device)[:, None]
        self.top_k = torch.from_numpy(mine.top_k).to(device)[:, None]
        self.keys = torch.from_numpy(row_keys(mine.seed, positions[rows])).to(device)


def _draw(logits: Tensor, rows: _Rows) -> Tensor:
    """Rows with neither top_k nor top_p: no sorting."""
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return _race(_heat(logits, rows), tokens[None], rows.keys)


def _heat(logits: Tensor, rows: _Rows) -> Tensor:
    """Apply temperature and min_p, in place."""
    logits.div_(rows.temperature)
    if rows.any_min_p:
        best = logits.amax(-1, keepdim=True)
        logits.masked_fill_(logits < best + rows.log_min_p, float("-inf"))
    return logits


def _race(logits: Tensor, tokens: Tensor, keys: Tensor) -> Tensor:
    """The winners' columns. -E / probability, up to a factor of the row: the greatest wins."""
    odds_against = (logits.amax(-1, keepdim=True) - logits).exp_()
    return log_uniforms(keys, tokens).mul_(odds_against).argmax(-1)


def _draw_top(logits: Tensor, rows: _Rows) -> Tensor:
    """Rows with top_k or top_p: look at the best few, and at all only where they do not suffice."""
    total = _heat(logits, rows).logsumexp(-1, keepdim=True)
    values, tokens = logits.topk(min(BEST, logits.shape[1]))
    least, known = _least_of_best(values, total, rows)
    values.masked_fill_(values < least, float("-inf"))
    winners = _race(values, tokens.to(torch.int32), rows.keys)
    chosen = tokens.gather(1, winners[:, None])[:, 0]
    hard = (~known[:, 0]).nonzero()[:, 0]
    if len(hard):
        chosen[hard] = _draw_any(
            logits[hard], rows.top_k[hard], rows.top_p[hard], rows.keys[:, hard]
        )
    return chosen


def _least_of_best(values: Tensor, total: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """The least logit that passes top_k and top_p [rows, 1], and whether `values` suffice for it.

    values: [rows, n], the best n in falling order; total: [rows, 1], the logarithm of the sum
    over the whole vocabulary. A tie with the last value may go on beyond it.
    """
    limited = rows.top_k > 0
    kth = values.gather(1, rows.top_k.clamp(1, values.shape[1]) - 1)
    kth = torch.where(limited, kth, float("-inf"))
    kept = values.masked_fill(values < kth, float("-inf"))
    total = torch.where(limited, kept.logsumexp(-1, keepdim=True), total)
    probabilities = (kept - total).exp_()
    before = probabilities.cumsum(-1) - probabilities
    within = (before < rows.top_p).sum(-1, keepdim=True).clamp_(min=1)
    least = torch.maximum(values.gather(1, within - 1), kth)
    last = values[:, -1:]
    known = (least > last) & ((kth > last) | ~limited)
    return least, known | (last == float("-inf"))


def _draw_any(logits: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor) -> Tensor:
    """The same without sorting: the least weight kept is found by bisection."""
    vocabulary = logits.shape[1]
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    least = torch.zeros_like(weights[:, :1])
    if bool((top_k > 0).any()):
        count = torch.where(top_k > 0, top_k, vocabulary)
        least = _bisect(weights, lambda kept: kept.sum(-1, keepdim=True) >= count)
        weights.mul_(weights >= least)
    share = top_p * weights.sum(-1, keepdim=True)
    least = torch.maximum(
        least, _bisect(weights, lambda kept: kept.mul_(weights).sum(-1, keepdim=True) >= share)
    )
    logits.masked_fill_(weights < least, float("-inf"))
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=logits.device)
    return _race(logits, tokens[None], keys)


def _bisect(weights: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The greatest t [rows, 1] such that the weights from t upwards are enough; 0 if there is none.

    weights: float32 [rows, n] in [0, 1]. `enough` gets ones where a weight is kept, else zeros.
    """
    kept = torch.empty_like(weights)
    low = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
    high = torch.ones_like(low, dtype=torch.float32).view(torch.int32)
    for _ in range(30):  # floats from 0 to 1 are ordered as their bits are, which are below 2**30
        middle = (low + high + 1) >> 1
        passed = enough(torch.ge(weights, middle.view(torch.float32), out=kept))
        low = torch.where(passed, middle, low)
        high = torch.where(passed, high, middle - 1)
    return low.view(torch.float32)

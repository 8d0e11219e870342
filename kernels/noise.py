"""Counter-based random numbers: each is a hash of (seed, position, token id)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNIT = 2.0**-31 * (1 - 2.0**-24)  # (2**31 - 0.5) * UNIT is still below 1 in float32


def row_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Two well mixed words for each row: int32 [2, rows]. Both inputs are int64 [rows]."""
    mixed = _mix64(_mix64(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    return mixed.view(np.int32).reshape(-1, 2).T.copy()


def log_uniforms(keys: Tensor, tokens: Tensor) -> Tensor:
    """Minus an exponential variable for each token: log(1 - v), v uniform in (0, 1).

    keys: int32 [2, rows]; tokens: int32 [rows or 1, n]. Returns float32 [rows, n], all below 0.
    v is kept precise near 0, because in a race the smallest of many thousand variables wins.
    """
    words = (tokens * _signed(0x9E3779B1)) ^ keys[0, :, None]
    shifted = torch.empty_like(words)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # "lowbias32", C. Wellons
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
        if shift == 16:
            words.add_(keys[1, :, None])
    torch.bitwise_right_shift(words, 16, out=shifted)
    words.bitwise_xor_(shifted).bitwise_and_(0x7FFFFFFF)
    return words.float().add_(0.5).mul_(-UNIT).log1p_()


def _mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64, with its increment."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _signed(word: int) -> int:
    """The int32 with these bits."""
    return word - (1 << 32) if word >= 1 << 31 else word

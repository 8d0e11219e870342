"""Leaving only some tokens to choose from: one bit each says whether it may come."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Forbid, in place, each token whose bit is not set.

    logits: [rows, vocabulary], any float type. bitmask: uint8 [rows, bytes], contiguous, on the
    same device: token t is bit t % 8 of byte t // 8; bits beyond the vocabulary do not matter.
    """
    vocabulary = logits.shape[1]
    if logits.device.type == "cpu":
        bits = np.unpackbits(bitmask.numpy(), axis=1, count=vocabulary, bitorder="little")
        allowed = torch.from_numpy(bits)
    else:
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = ((bitmask[:, :, None] >> shifts) & 1).flatten(1)[:, :vocabulary]
    logits.masked_fill_(allowed == 0, float("-inf"))

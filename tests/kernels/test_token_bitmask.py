"""Only tokens whose bit is set remain."""

from __future__ import annotations

import pytest
import torch

from kernels.token_bitmask import apply_token_bitmask

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [1, 8, 37, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forbidden_tokens_are_impossible_and_others_untouched(
    device: str, vocabulary: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(5, vocabulary, generator=generator).to(dtype)
    allowed = torch.rand(5, vocabulary, generator=generator) < 0.5
    bitmask = torch.full((5, -(-vocabulary // 32) * 4), 255, dtype=torch.uint8)  # whole words
    for row, token in (~allowed).nonzero().tolist():
        bitmask[row, token // 8] &= 255 - (1 << token % 8)
    masked = logits.to(device)
    apply_token_bitmask(masked, bitmask.to(device))
    expected = torch.where(allowed, logits, torch.tensor(float("-inf"), dtype=dtype))
    assert torch.equal(masked.cpu(), expected)

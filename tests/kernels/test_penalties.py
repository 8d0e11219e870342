"""Penalties against counts made by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kernels import penalties
from kernels.penalties import Penalized, penalize

VOCAB = 40


@pytest.mark.parametrize("chunk", [1 << 22, 2 * VOCAB, 1])
def test_each_row_by_its_own_tokens(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "CHUNK_NUMBERS", chunk)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, VOCAB, generator=generator)
    tokens = torch.randint(0, VOCAB, (6, 60), generator=generator, dtype=torch.int32)
    rows, slots, ends = [5, 0, 3], [1, 4, 2], [50, 1, 33]
    prompts = [7, 1, 33]
    repetition, frequency, presence = [1.5, 1.2, 0.8], [0.3, 1.0, 1.0], [0.0, -1.0, 0.5]
    expected = logits.clone()
    for index, row in enumerate(rows):
        known = tokens[slots[index], : ends[index]].tolist()
        for token in set(known):
            value, factor = expected[row, token], repetition[index]
            expected[row, token] = value / factor if value > 0 else value * factor
        for token, count in Counter(known[prompts[index] :]).items():
            expected[row, token] -= frequency[index] * count + presence[index]
    ints, floats = (rows, slots, prompts, ends), (repetition, frequency, presence)
    penalized = Penalized(*map(torch.tensor, ints), *map(torch.tensor, floats))
    penalize(logits, tokens, penalized, max(ends))
    torch.testing.assert_close(logits, expected)

"""Logprobs of tokens against log_softmax."""

from __future__ import annotations

import pytest
import torch

from kernels import logprobs
from kernels.logprobs import LEAST, token_logprobs

VOCAB = 50


@pytest.mark.parametrize("chunk", [1 << 22, 3 * VOCAB, 1])
@pytest.mark.parametrize("count", [0, 5, VOCAB, VOCAB + 9])
def test_they_are_those_of_the_whole_distribution(
    count: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_NUMBERS", chunk)
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(1)) * 5
    tokens = torch.arange(7) * 7
    told = token_logprobs(logits, tokens, count)
    expected = logits.log_softmax(-1)
    best = expected.sort(descending=True)
    assert torch.equal(told.ids[:, 0], tokens)
    assert torch.equal(told.ids[:, 1:], best.indices[:, :count])
    torch.testing.assert_close(told.values, expected.gather(1, told.ids))
    assert torch.equal(told.ranks, (best.indices == tokens[:, None]).int().argmax(-1) + 1)


def test_of_tokens_that_tie_each_has_the_best_rank() -> None:
    told = token_logprobs(torch.zeros(1, 9).bfloat16(), torch.tensor([4]), 0)
    assert told.ranks.tolist() == [1]
    assert told.values[0, 0].item() == pytest.approx(-torch.tensor(9.0).log().item())


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_they_are_always_numbers(value: float) -> None:
    logits = torch.zeros(2, 9)
    logits[0, 3] = value
    logits[1] = value
    told = token_logprobs(logits, torch.tensor([3, 3]), 9)
    assert told.values.isfinite().all()
    assert (told.values >= LEAST).all() and (told.values <= 0).all()
    if value == float("-inf"):
        assert told.values[0, 0] == LEAST


def test_there_may_be_no_tokens() -> None:
    told = token_logprobs(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), 2)
    assert told.values.shape == (0, 3)

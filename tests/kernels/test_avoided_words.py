"""Words that are not completed."""

from __future__ import annotations

import torch

from kernels.avoided_words import AVOIDED, Words, avoid_words
from kernels.sampling import SamplingColumns, sample

TOKENS = torch.tensor([[4, 5, 6, 9, 9], [6, 9, 9, 9, 9]], dtype=torch.int32)


def avoided(*words: tuple[int, int, int, list[int], int]) -> list[tuple[int, int]]:
    """(row, token) of those avoided; words: row, slot, end, three ids before, the last."""
    rows, slots, ends, firsts, lasts = map(torch.tensor, zip(*words, strict=True))
    logits = torch.zeros(3, 12)
    avoid_words(logits, TOKENS, Words(rows, slots, ends, firsts, lasts))
    return [(int(row), int(token)) for row, token in (logits == AVOIDED).nonzero()]


def test_a_word_is_avoided_where_it_has_begun() -> None:
    assert avoided((2, 0, 3, [4, 5, 6], 7)) == [(2, 7)]
    assert avoided((2, 0, 3, [-1, 5, 6], 7), (0, 1, 1, [-1, -1, 6], 7)) == [(0, 7), (2, 7)]
    assert avoided((2, 0, 3, [-1, 4, 6], 7)) == []
    assert avoided((2, 0, 2, [-1, 5, 6], 7)) == []  # its last token is still to come
    assert avoided((1, 1, 1, [-1, 9, 6], 7)) == []  # longer than what there is
    assert avoided((1, 1, 1, [-1, -1, -1], 7)) == [(1, 7)]


def test_two_words_with_the_same_end_do_not_disturb_each_other() -> None:
    assert avoided((0, 0, 3, [-1, -1, 6], 7), (0, 0, 3, [-1, -1, 8], 7)) == [(0, 7)]
    assert avoided((0, 0, 3, [-1, -1, 8], 7), (0, 0, 3, [-1, -1, 6], 7)) == [(0, 7)]


def test_what_is_forbidden_remains_so() -> None:
    logits = torch.tensor([[0.0, float("-inf")]])
    zeros, none = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64)
    avoid_words(logits, TOKENS, Words(zeros, zeros, zeros + 1, none, torch.tensor([0, 1])))
    assert logits.tolist() == [[torch.tensor(AVOIDED).item(), float("-inf")]]


def test_what_is_avoided_comes_only_where_nothing_else_can() -> None:
    logits = torch.full((64, 9), AVOIDED)
    logits[:32, 5] = -50.0
    logits[32:, 4:] = float("-inf")
    columns = SamplingColumns.zeros(64)
    columns.temperature[:], columns.top_p[:] = 1.0, 1.0
    columns.temperature[::2], columns.top_k[::3], columns.top_p[::4] = 1e-4, 3, 0.5
    tokens = sample(logits, columns, torch.arange(64).numpy())
    assert (tokens[:32] == 5).all()
    assert (tokens[32:] < 4).all()

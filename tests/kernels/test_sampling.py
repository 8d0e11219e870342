"""Sampling: the right distribution, and a function of each row alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kernels.noise import log_uniforms, row_keys
from kernels.sampling import BEST, SamplingColumns, sample

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def columns(rows: list[Params]) -> SamplingColumns:
    made = SamplingColumns.zeros(len(rows))
    for index, row in enumerate(rows):
        made.greedy[index] = row.temperature == 0
        made.temperature[index] = row.temperature
        made.top_k[index] = row.top_k
        made.top_p[index] = row.top_p
        made.min_p[index] = row.min_p
        made.seed[index] = row.seed
    return made


def draw(logits: Tensor, rows: list[Params], positions: list[int]) -> list[int]:
    return sample(logits, columns(rows), np.array(positions, np.int64)).tolist()


def kept(logits: Floats, params: Params) -> tuple[NDArray[np.bool_], float]:
    """What vLLM's filters keep, written out, and how near top_p comes to deciding otherwise."""
    scaled = logits / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    keep = probabilities >= params.min_p
    if 0 < params.top_k < len(logits):
        ranked = np.sort(np.where(keep, scaled, -np.inf))
        keep &= scaled >= ranked[-params.top_k]
    if params.top_p >= 1:
        return keep, 1.0
    shares = np.where(keep, probabilities, 0)
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    before = np.cumsum(shares[order]) - shares[order]
    last = order[np.flatnonzero((before < params.top_p) | (np.arange(len(order)) == 0))[-1]]
    margins = np.abs(before - params.top_p)
    return keep & (scaled >= scaled[last]), float(margins.min())


def winner(logits: Floats, params: Params, position: int, keep: NDArray[np.bool_]) -> int:
    """The race, written out."""
    keys = row_keys(np.array([params.seed]), np.array([position]))
    tokens = torch.arange(len(logits), dtype=torch.int32)[None]
    times = -log_uniforms(torch.from_numpy(keys), tokens)[0].double().numpy()
    scaled = logits / params.temperature
    scores = np.log(times) - scaled
    return int(np.argmin(np.where(keep, scores, np.inf)))


parameters = st.builds(
    Params,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, BEST, BEST + 30, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


def random_logits(rows: int, vocabulary: int, seed: int, coarse: bool) -> Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    return (logits * 2).round() / 2 if coarse else logits  # coarse: many ties


@settings(max_examples=200, deadline=None)
@given(
    parameters,
    st.sampled_from([5, 100, 3 * BEST]),
    st.integers(0, 1000),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)
def test_the_winner_is_that_of_the_race_among_the_kept(
    params: Params, vocabulary: int, seed: int, position: int, coarse: bool
) -> None:
    logits = random_logits(1, vocabulary, seed, coarse)
    numbers = logits[0].double().numpy()
    keep, margin = kept(numbers, params)
    assume(margin > 1e-5)
    assert draw(logits, [params], [position]) == [winner(numbers, params, position, keep)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(parameters | st.just(Params(temperature=0.0)), min_size=2, max_size=12),
    st.integers(0, 1000),
    st.randoms(use_true_random=False),
)
def test_a_row_does_not_depend_on_other_rows(
    rows: list[Params], seed: int, random: np.random.Generator
) -> None:
    logits = random_logits(len(rows), 3 * BEST, seed, coarse=seed % 2 == 0)
    positions = [17 * index for index in range(len(rows))]
    together = draw(logits, rows, positions)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = draw(logits[order], [rows[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]
    for index, row in enumerate(rows):
        assert draw(logits[index : index + 1], [row], [positions[index]]) == [together[index]]


@pytest.mark.parametrize(
    "params",
    [
        Params(),
        Params(temperature=0.5),
        Params(temperature=2.0, top_k=6),
        Params(top_p=0.8),
        Params(min_p=0.1),
        Params(top_k=8, top_p=0.9, min_p=0.02),
    ],
)
@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_frequencies_are_the_probabilities(params: Params, axis: str) -> None:
    draws = 40_000
    logits = torch.tensor([2.0, 1.5, 1.2, 1.0, 0.4, 0.0, -0.3, -0.7, -1.5, -3.0, -4.0])
    numbers = logits.double().numpy()
    keep, _ = kept(numbers, params)
    expected = np.where(keep, np.exp(numbers / params.temperature), 0)
    expected *= draws / expected.sum()
    made = columns([params] * draws)
    steps = np.arange(draws, dtype=np.int64)
    if axis == "seeds":
        made.seed[:] = steps
    positions = steps if axis == "positions" else np.full(draws, 9, np.int64)
    tokens = sample(logits.expand(draws, -1), made, positions).numpy()
    counts = np.bincount(tokens, minlength=len(numbers))
    assert counts[~keep].sum() == 0
    freedom = keep.sum() - 1
    chi = np.sum((counts[keep] - expected[keep]) ** 2 / expected[keep])
    assert chi < freedom + 4 * np.sqrt(2 * freedom)


def test_improbable_tokens_win_as_often_as_they_should() -> None:
    draws, vocabulary = 2000, 50_000
    logits = torch.zeros(1, vocabulary)
    logits[0, 0] = 10.0  # 22026 / (22026 + 49999) = 0.3058
    made = columns([Params(seed=5)] * draws)
    tokens = sample(logits.expand(draws, -1), made, np.arange(draws, dtype=np.int64)).numpy()
    share = np.count_nonzero(tokens == 0) / draws
    assert abs(share - 0.3058) < 4 * np.sqrt(0.3058 * 0.6942 / draws)
    rest = tokens[tokens > 0]
    halves = np.count_nonzero(rest > vocabulary // 2) - len(rest) / 2
    assert abs(halves) < 4 * np.sqrt(len(rest)) / 2


@pytest.mark.parametrize("params", [Params(top_k=1), Params(top_k=BEST), Params(top_p=0.1)])
def test_ties_with_the_last_one_kept_go_on_beyond_the_best_few(params: Params) -> None:
    flat = torch.zeros(300, 3 * BEST)
    assert max(draw(flat, [params] * 300, list(range(300)))) > 2 * BEST


@pytest.mark.parametrize("temperature", [1.01e-5, 1e-4])
def test_tiny_temperatures_take_the_best_token(temperature: float) -> None:
    logits = random_logits(8, 500, 3, coarse=False) * 20
    for params in (Params(temperature), Params(temperature, top_p=0.5), Params(temperature, 9)):
        assert draw(logits, [params] * 8, list(range(8))) == logits.argmax(-1).tolist()


def test_forbidden_tokens_are_never_taken() -> None:
    logits = torch.full((1, 300), float("-inf"))
    logits[0, 123] = -2.0
    options = [Params(), Params(top_k=5), Params(top_p=0.3), Params(min_p=0.1), Params(0.0)]
    for params in options:
        assert draw(logits.expand(50, -1), [params] * 50, list(range(50))) == [123] * 50


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", [Params(), Params(top_p=0.5), Params(top_k=3), Params(0.0)])
def test_logits_that_are_no_numbers_still_give_a_token(value: float, params: Params) -> None:
    vocabulary = 3 * BEST
    logits = random_logits(3, vocabulary, 1, coarse=False)
    healthy = draw(logits[[0, 2]], [params] * 2, [0, 2])
    logits[1] = value
    tokens = draw(logits, [params] * 3, [0, 1, 2])
    assert 0 <= tokens[1] < vocabulary
    assert [tokens[0], tokens[2]] == healthy


def test_greedy_ignores_filters_and_noise() -> None:
    logits = random_logits(4, 200, 8, coarse=False).bfloat16()
    rows = [Params(0.0, seed=seed, top_k=seed) for seed in range(4)]
    assert draw(logits, rows, [0, 1, 2, 3]) == logits.argmax(-1).tolist()

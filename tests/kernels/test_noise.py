"""The hash behind sampling: uniform, and without a trace of seed, position or token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.noise import log_uniforms, row_keys


def uniforms(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], tokens: int
) -> NDArray[np.float64]:
    keys = torch.from_numpy(row_keys(seeds, positions))
    values = log_uniforms(keys, torch.arange(tokens, dtype=torch.int32)[None])
    return np.asarray(-np.expm1(values.double().numpy()))


def chi_square(values: NDArray[np.float64], bins: int) -> float:
    """In standard deviations from what uniform values give."""
    counts, _ = np.histogram(values, bins, (0, 1))
    expected = values.size / bins
    return float((np.sum((counts - expected) ** 2) / expected - (bins - 1)) / np.sqrt(2 * bins))


def many(axis: str, count: int) -> NDArray[np.float64]:
    """Values that differ by one thing only."""
    steps = np.arange(count, dtype=np.int64)
    same = np.full(count, 12345, np.int64)
    match axis:
        case "seed":
            return uniforms(steps, same, 1)
        case "high seed bits":
            return uniforms(steps << np.int64(40), same, 1)
        case "position":
            return uniforms(same, steps, 1)
        case _:
            return uniforms(same[:1], steps[:1], count)


@pytest.mark.parametrize("axis", ["seed", "high seed bits", "position", "token"])
def test_neighbours_along_each_axis_are_uniform_and_independent(axis: str) -> None:
    values = many(axis, 200_000).reshape(-1)
    assert abs(chi_square(values, 500)) < 4
    for lag in (1, 2, 16):
        pairs = np.floor(values[:-lag] * 20) / 20 + values[lag:] / 20
        assert abs(chi_square(pairs, 400)) < 4, lag


def test_the_smallest_values_are_as_frequent_as_they_should_be() -> None:
    steps = np.arange(64, dtype=np.int64)
    values = uniforms(steps, steps, 1 << 16)  # 4.2 million
    for bound in (1e-3, 1e-4, 1e-5):
        expected = values.size * bound
        assert abs(np.count_nonzero(values < bound) - expected) < 4 * np.sqrt(expected)
    assert values.min() > 0


def test_no_value_is_zero_or_infinite() -> None:
    keys = torch.from_numpy(row_keys(np.arange(400), np.arange(400)))
    values = log_uniforms(keys, torch.arange(1 << 14, dtype=torch.int32)[None])
    assert (values < 0).all()
    assert values.isfinite().all()


def test_it_is_the_same_on_every_machine() -> None:
    """Streams go on elsewhere after a crash: these numbers are part of the protocol."""
    keys = row_keys(np.array([0, 2**63 - 1]), np.array([0, 2**31 - 1]))
    assert keys.T.tolist() == [[1293516399, -1492722385], [-1804950575, -558493375]]
    values = log_uniforms(torch.from_numpy(keys), torch.tensor([[0, 49151]], dtype=torch.int32))
    torch.testing.assert_close(
        values,
        torch.tensor([[-0.05830899, -0.1124351], [-0.86342931, -0.80880302]]),
        rtol=1e-6,
        atol=0,
    )

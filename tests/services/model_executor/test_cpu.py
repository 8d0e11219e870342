"""How many threads compute: no more than there are cores, however many executors share them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.model_executor.cpu import use_threads


@pytest.fixture
def cores() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield 6
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("count", "executors", "expected"), [(None, 1, 6), (None, 2, 3), (None, 9, 1), (5, 2, 5)]
)
def test_executors_share_the_cores(
    cores: int, count: int | None, executors: int, expected: int
) -> None:
    use_threads(count, executors)
    assert torch.get_num_threads() == expected

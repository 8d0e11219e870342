"""How large the cache is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.model_executor import kv_cache
from services.model_executor.kv_cache import LayerShape, allocate, count_blocks
from services.model_executor.memory import free_memory
from shared.settings import Settings

CPU = torch.device("cpu")
LAYERS = [LayerShape(2, 8, 8), LayerShape(1, 8, 4)]
BLOCK_BYTES = (2 * 16 + 12) * 2 * 16  # bfloat16, 16 tokens


def blocks(max_model_len: int = 1600, **settings: Any) -> int:
    return count_blocks(Settings(**settings), LAYERS, torch.bfloat16, CPU, max_model_len)


def test_the_number_of_blocks_can_be_set() -> None:
    assert blocks(num_gpu_blocks_override=17) == 17


def test_a_set_amount_of_memory_is_kept_to() -> None:
    fitting = blocks(kv_cache_memory_bytes=21 * BLOCK_BYTES)
    caches = allocate(LAYERS, fitting, 16, torch.bfloat16, CPU)
    assert sum(side.nbytes for cache in caches for side in cache) == 21 * BLOCK_BYTES


def test_no_more_than_all_slots_can_fill() -> None:
    assert blocks(max_model_len=100, max_num_seqs=3, kv_cache_memory_bytes=1 << 30) == 3 * 7


@pytest.mark.parametrize(("free", "expected"), [(1000 * BLOCK_BYTES, 400), (100 << 30, 6400)])
def test_by_itself_it_takes_a_share_of_what_is_free(
    free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda: free)
    assert blocks() in (expected, expected - 1)


def test_executors_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda: 1000 * BLOCK_BYTES)
    assert blocks(executors=4) in (99, 100)


def test_free_memory_is_the_containers_if_that_is_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert free_memory(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("4000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\ninactive_file 100000\n")
    assert free_memory(meminfo, tmp_path) == 3_100_000


def test_free_memory_of_this_machine() -> None:
    assert 0 < free_memory() < 1 << 50

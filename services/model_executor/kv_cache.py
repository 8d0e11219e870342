"""The KV cache: how many blocks the memory holds, and the blocks themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.paged_attention import PagedKV
from services.model_executor.memory import free_memory
from shared.bounds import MAX_BLOCKS
from shared.settings import Settings

CPU_SHARE = 0.4  # of the memory that is free once the model is loaded
CPU_MOST = 4 << 30  # bytes; more is asked for by name, with `kv_cache_memory_bytes`


class LayerShape(NamedTuple):
    """What one layer stores of a token."""

    kv_heads: int
    key_dim: int
    value_dim: int


def count_blocks(
    settings: Settings,
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> int:
    """How many blocks to have: as set, or what fits, but not more than can ever be in use."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    per_token = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    block_bytes = per_token * dtype.itemsize * settings.block_size
    useful = settings.max_num_seqs * -(-max_model_len // settings.block_size)
    # One is the null block.
    return min(_cache_bytes(settings, device) // block_bytes - 1, useful, MAX_BLOCKS)


def _cache_bytes(settings: Settings, device: torch.device) -> int:
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes
    if device.type == "cuda":
        return _cuda_cache_bytes(settings, device)
    return min(CPU_MOST, int(free_memory() * CPU_SHARE / settings.executors))


def _cuda_cache_bytes(settings: Settings, device: torch.device) -> int:
    """Our share of the device, less what the model takes of it."""
    free, total = torch.cuda.mem_get_info(device)
    sharers = -(-settings.executors // torch.cuda.device_count())
    taken = total - free if sharers == 1 else torch.cuda.memory_reserved(device)
    return int(total * settings.gpu_memory_utilization / sharers) - taken


def allocate(
    layers: Sequence[LayerShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[PagedKV]:
    """The cache of each layer, with its null block behind the others.

    Only the null block is filled: touching gigabytes at the start would take seconds, and whoever
    begins a block clears it.
    """

    def empty(heads: int, dim: int) -> torch.Tensor:
        cache = torch.empty(heads, num_blocks + 1, block_size, dim, dtype=dtype, device=device)
        cache[:, num_blocks] = 0
        return cache

    return [
        PagedKV(empty(layer.kv_heads, layer.key_dim), empty(layer.kv_heads, layer.value_dim))
        for layer in layers
    ]

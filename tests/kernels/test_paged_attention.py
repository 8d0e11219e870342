"""Paged attention against attention of each sequence alone, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import paged_batch
from kernels.paged_attention import PagedKV, Variant, paged_attention
from kernels.paged_batch import PagedBatch


@dataclass(frozen=True)
class Case:
    rows: list[tuple[int, int]]  # (start, count)
    block_size: int
    kv_heads: int
    heads_per_kv: int
    key_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    sinks: bool
    bounds: tuple[int, int, int]  # PIECE_QUERIES, GROUP_SCORES, GROUP_KEYS
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    decode = st.tuples(st.integers(0, 60), st.just(1))
    chunk = st.tuples(st.integers(0, 30), st.integers(1, 40))
    key_dim = draw(st.sampled_from([4, 8]))
    return Case(
        rows=draw(st.lists(decode | chunk, min_size=1, max_size=8)),
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        kv_heads=draw(st.integers(1, 3)),
        heads_per_kv=draw(st.integers(1, 3)),
        key_dim=key_dim,
        value_dim=draw(st.sampled_from([key_dim, 6])),
        window=draw(st.none() | st.integers(1, 50)),
        softcap=draw(st.none() | st.just(2.0)),
        sinks=draw(st.booleans()),
        bounds=draw(st.sampled_from([(256, 1 << 20, 1 << 13), (8, 128, 32), (1, 1, 1)])),
        seed=draw(st.integers(0, 2**31)),
    )


def naive(query: Tensor, keys: Tensor, values: Tensor, variant: Variant, start: int) -> Tensor:
    """query: [heads, count, dim]; keys, values: [kv heads, start + count, dim]; all float64."""
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    output = torch.empty(query.shape[1], query.shape[0], values.shape[2], dtype=torch.float64)
    for head in range(query.shape[0]):
        for index in range(query.shape[1]):
            end = start + index + 1
            first = 0 if variant.window is None else max(0, end - variant.window)
            scores = keys[head, first:end] @ query[head, index] * variant.scale
            if variant.softcap is not None:
                scores = variant.softcap * torch.tanh(scores / variant.softcap)
            if variant.sinks is not None:
                scores = torch.cat([scores, variant.sinks[head : head + 1].double()])
            weights = torch.softmax(scores, 0)[: end - first]
            output[index, head] = weights @ values[head, first:end]
    return output


def run(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(ours, the reference), [tokens, heads, value dim]."""
    random = torch.Generator().manual_seed(case.seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    ends = [start + count for start, count in case.rows]
    needed = [-(-end // case.block_size) for end in ends]
    null_block = sum(needed) + 2
    order = torch.randperm(null_block, generator=random).tolist()
    table = np.full((len(ends), max(needed) + 1), -1, np.int32)
    shape = case.kv_heads, null_block + 1, case.block_size
    # What is stale must never be read: it is no number here.
    cache = PagedKV(
        torch.full((*shape, case.key_dim), math.nan, dtype=dtype),
        torch.full((*shape, case.value_dim), math.nan, dtype=dtype),
    )
    heads = case.kv_heads * case.heads_per_kv
    variant = Variant(0.3, case.window, case.softcap, numbers(heads) if case.sinks else None)
    queries, new_keys, new_values, expected = [], [], [], []
    for side in cache:
        side[:, null_block] = 0
    for row, ((start, count), end) in enumerate(zip(case.rows, ends, strict=True)):
        blocks = [order.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = blocks
        query = numbers(heads, count, case.key_dim)
        keys, values = (
            numbers(case.kv_heads, end, case.key_dim),
            numbers(case.kv_heads, end, case.value_dim),
        )
        for side, history in zip(cache, (keys, values), strict=True):
            for at in range(start):
                block, offset = blocks[at // case.block_size], at % case.block_size
                if offset == 0:
                    side[:, block] = 0
                side[:, block, offset] = history[:, at]
        queries.append(query)
        new_keys.append(keys[:, start:])
        new_values.append(values[:, start:])
        expected.append(naive(query.double(), keys.double(), values.double(), variant, start))
    starts, counts = np.array(case.rows, np.int64).T
    batch = PagedBatch(
        starts,
        counts,
        table,
        block_size=case.block_size,
        null_block=null_block,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    output = paged_attention(
        torch.cat(queries, 1), torch.cat(new_keys, 1), torch.cat(new_values, 1), cache, batch,
        variant,
    )  # fmt: skip
    return output, torch.cat(expected)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_mixed_batch_attends_like_its_sequences_alone(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, bound in zip(
            ("PIECE_QUERIES", "GROUP_SCORES", "GROUP_KEYS"), case.bounds, strict=True
        ):
            patch.setattr(paged_batch, name, bound)
        ours, reference = run(case, torch.float32)
    torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_bfloat16_is_as_near_as_its_precision(case: Case) -> None:
    ours, reference = run(case, torch.bfloat16)
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours.double(), reference, rtol=0.03, atol=0.03)


def _batch(starts: list[int], counts: list[int], block_size: int = 16) -> PagedBatch:
    ends = np.add(starts, counts)
    blocks = np.zeros((len(starts), int(ends.max()) // block_size + 1), np.int32)
    return PagedBatch(
        np.array(starts, np.int64),
        np.array(counts, np.int64),
        blocks,
        block_size=block_size,
        null_block=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_groups_grow_with_the_logarithm_of_lengths_not_with_rows() -> None:
    few = _batch(list(range(20, 84, 2)), [1] * 32).layout(None, 3).groups
    assert len(few) == 3  # of 2, up to 4 and up to 8 blocks
    once = _batch([0] * 200, [3] * 200).layout(None, 3).groups
    assert len(once) == 1


def test_groups_keep_to_their_bounds() -> None:
    batch = _batch([5000] * 40 + [8000], [1] * 40 + [4000])
    layout = batch.layout(None, 4)
    assert sum(group.pieces for group in layout.groups) > 41
    for group in layout.groups:
        assert group.pieces == 1 or group.pieces * group.keys <= paged_batch.GROUP_KEYS
        scores = group.pieces * group.queries * group.keys
        assert scores <= paged_batch.GROUP_SCORES + group.keys * batch.block_size


def test_a_window_leaves_older_blocks_unread() -> None:
    (group,) = _batch([8000], [1]).layout(64, 1).groups
    assert group.keys <= 64 + 16


def test_layers_of_one_kind_share_their_layout() -> None:
    batch = _batch([3, 9], [1, 5])
    assert batch.layout(None, 2) is batch.layout(None, 2)
    assert batch.layout(4, 2) is not batch.layout(None, 2)

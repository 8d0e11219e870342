"""Attention of a flat batch of rows over a paged KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.paged_batch import Group, PagedBatch


class PagedKV(NamedTuple):
    """One layer's cache. The last block is the null block: it stays zero."""

    keys: Tensor  # [kv heads, blocks + 1, block size, key head dim]
    values: Tensor  # [kv heads, blocks + 1, block size, value head dim]


class Variant(NamedTuple):
    """The scalars and tensors in which models' attention differs."""

    scale: float
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [heads]: a score per head that takes weight but has no value


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKV, batch: PagedBatch, variant: Variant
) -> Tensor:
    """Write the tokens' keys and values into the cache, then attend, causally, each in its row.

    query: [heads, tokens, key head dim]; key, value: [kv heads, tokens, head dim]. Returns
    [tokens, heads, value head dim] in the query's dtype. The memory it takes is bounded by the
    group bounds of `paged_batch` and by one sequence's keys and values of one layer.
    """
    _write(cache.keys, key, batch)
    _write(cache.values, value, batch)
    return _attend(query, cache, batch, variant)


def _write(cache: Tensor, new: Tensor, batch: PagedBatch) -> None:
    if batch.fresh_blocks is not None:
        cache.index_fill_(1, batch.fresh_blocks, 0)
    cache.flatten(1, 2).index_copy_(1, batch.cache_slots, new)


def _attend(query: Tensor, cache: PagedKV, batch: PagedBatch, variant: Variant) -> Tensor:
    """The form in torch operations: gather each group's blocks, then one dense call."""
    kv_heads = cache.keys.shape[0]
    layout = batch.layout(variant.window, query.shape[0] // kv_heads)
    if layout.order is not None:
        query = query.index_select(1, layout.order)
    outputs = [_attend_group(query, cache, group, variant) for group in layout.groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if layout.back is None else output.index_select(0, layout.back)


def _attend_group(query: Tensor, cache: PagedKV, group: Group, variant: Variant) -> Tensor:
    """[pieces * queries, heads, value head dim]."""
    heads, _, dim = query.shape
    kv_heads = cache.keys.shape[0]
    shape = kv_heads, heads // kv_heads, group.pieces, group.queries
    mine = query.narrow(1, group.first, group.pieces * group.queries)
    # [kv heads, pieces, heads per KV head * queries, dim]: keys and values are not repeated
    packed = mine.reshape(*shape, dim).transpose(1, 2).flatten(2, 3)
    keys = cache.keys.index_select(1, group.blocks)
    keys = keys.view(kv_heads, group.pieces, group.keys, dim)
    values = cache.values.index_select(1, group.blocks)
    values = values.view(kv_heads, group.pieces, group.keys, -1)
    if variant.softcap is None and variant.sinks is None:
        output = torch.nn.functional.scaled_dot_product_attention(
            packed, keys, values, attn_mask=group.mask, scale=variant.scale
        )
    else:
        output = _explicit(packed, keys, values, group, variant)
    output = output.reshape(kv_heads, group.pieces, shape[1], group.queries, -1)
    return output.permute(1, 3, 0, 2, 4).reshape(group.pieces * group.queries, heads, -1)


def _explicit(
    query: Tensor, keys: Tensor, values: Tensor, group: Group, variant: Variant
) -> Tensor:
    """The softmax written out, in float32, for what the fused call has no form of."""
    scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)).mul_(variant.scale)
    if variant.softcap is not None:
        scores.div_(variant.softcap).tanh_().mul_(variant.softcap)
    scores.add_(group.mask)
    peak = scores.amax(-1, keepdim=True)
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(query.shape[0], 1, -1, 1)
        sinks = sinks.repeat_interleave(group.queries, dim=2)
        peak = torch.maximum(peak, sinks)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if variant.sinks is not None:
        total += (sinks - peak).exp_()
    return torch.matmul(weights.div_(total), values.float()).to(query.dtype)

"""What one iteration's attention needs to know of its rows; computed once, used by every layer.

A row is a run of consecutive tokens of one sequence: a prefill chunk, or the one token of a
decode. The tokens of all rows lie one after another in a flat batch. Long rows are cut into
pieces, so that early queries do not look at late keys and masks stay small; pieces of like size
form groups, and each group is one dense attention call. The number of groups grows with the
logarithms of query and key lengths, not with the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

PIECE_QUERIES = 256  # queries of a piece: longer ones waste half of their scores on the mask
GROUP_SCORES = 1 << 20  # queries x keys of a group, per head: bounds the mask
GROUP_KEYS = 1 << 12  # keys gathered for a group; one sequence's own may be more


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces that one dense attention call computes; each is padded to `queries` and `keys`."""

    first: int  # where its queries begin, among those of all groups
    pieces: int
    queries: int  # per piece; padding repeats the piece's last query
    keys: int  # per piece
    blocks: Tensor  # int64 [pieces * keys / block size]
    mask: Tensor  # [1, pieces, 1 or heads per KV head * queries, keys]: 0 where visible, else -inf


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of an iteration, and how to get from token order to group order and back."""

    groups: list[Group]
    order: Tensor | None  # int64 [all groups' queries]: the token of each query; None: the same
    back: Tensor | None  # int64 [tokens]: the query that is this token's; None: the same


class PagedBatch:
    """One iteration's rows against a paged cache.

    `starts` and `counts` (int64 [rows]) say which positions each row computes; `block_tables`
    (int32 [rows, any]) which cache blocks hold its sequence. `null_block` is a block that no
    sequence owns; it is read, masked, as padding, so it must hold numbers. `dtype` is the masks'.
    """

    def __init__(
        self,
        starts: Ints,
        counts: Ints,
        block_tables: NDArray[np.int32],
        *,
        block_size: int,
        null_block: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.starts = starts
        self.counts = counts
        self.block_tables = block_tables
        self.block_size = block_size
        self.null_block = null_block
        self.device = device
        self.dtype = dtype
        self.row_firsts = np.cumsum(counts) - counts  # each row's first token in the flat batch
        self.token_rows = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(self.token_rows)) - self.row_firsts[self.token_rows]
        self.positions: Ints = starts[self.token_rows] + offsets
        self.cache_slots = self._upload(self._cache_slots())
        self.fresh_blocks = self._fresh_blocks()
        self._layouts: dict[tuple[int | None, int], Layout] = {}

    def layout(self, window: int | None, heads_per_kv: int) -> Layout:
        """The groups for layers with this sliding window (tokens seen, the own one included)."""
        key = window, heads_per_kv
        if key not in self._layouts:
            self._layouts[key] = _Pieces(self, window).layout(heads_per_kv)
        return self._layouts[key]

    def _cache_slots(self) -> Ints:
        """Where each token's key and value go: block * block size + offset."""
        blocks = self.block_tables[self.token_rows, self.positions // self.block_size]
        slots: Ints = blocks.astype(np.int64) * self.block_size + self.positions % self.block_size
        return slots

    def _fresh_blocks(self) -> Tensor | None:
        """Blocks that this iteration begins but does not fill.

        Their rest is read under the mask: it must not hold what is no number.
        """
        ends = self.starts + self.counts
        last = (ends - 1) // self.block_size
        begun = (last * self.block_size >= self.starts) & (ends % self.block_size != 0)
        if not begun.any():
            return None
        rows = np.flatnonzero(begun)
        return self._upload(self.block_tables[rows, last[rows]].astype(np.int64))

    def _upload(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


class _Pieces:
    """The pieces of a batch's rows, in group order, under one sliding window."""

    def __init__(self, batch: PagedBatch, window: int | None) -> None:
        ends = batch.starts + batch.counts
        most = np.clip(GROUP_SCORES // ends, 1, PIECE_QUERIES)
        pieces_per_row = -(-batch.counts // most)
        rows = np.repeat(np.arange(len(ends)), pieces_per_row)
        index = np.arange(len(rows)) - (np.cumsum(pieces_per_row) - pieces_per_row)[rows]
        offsets = index * most[rows]
        starts = batch.starts[rows] + offsets
        lengths = np.minimum(most[rows], batch.counts[rows] - offsets)
        oldest = np.maximum(0, starts - window + 1) if window else np.zeros_like(starts)
        first_blocks = oldest // batch.block_size
        blocks = -(-(starts + lengths) // batch.block_size) - first_blocks
        order = np.lexsort((-blocks, _log2(lengths)))
        self.batch = batch
        self.window = window
        self.rows = rows[order]
        self.starts = starts[order]
        self.lengths = lengths[order]
        self.tokens = (batch.row_firsts[rows] + offsets)[order]
        self.first_blocks = first_blocks[order]
        self.blocks = blocks[order]

    def layout(self, heads_per_kv: int) -> Layout:
        groups: list[Group] = []
        orders: list[Ints] = []
        back = np.empty(len(self.batch.token_rows), np.int64)
        first = 0
        for begin, end in self._cuts():
            queries = int(self.lengths[begin:end].max())
            offsets = np.minimum(np.arange(queries), self.lengths[begin:end, None] - 1)
            tokens = (self.tokens[begin:end, None] + offsets).reshape(-1)
            back[tokens] = first + np.arange(len(tokens))  # of equal queries (padding), any
            positions = self.starts[begin:end, None] + offsets
            groups.append(self._group(begin, end, first, positions, heads_per_kv))
            orders.append(tokens)
            first += len(tokens)
        order = np.concatenate(orders)
        if np.array_equal(order, np.arange(len(back))):
            return Layout(groups, None, None)
        upload = self.batch._upload
        return Layout(groups, upload(order), upload(back))

    def _cuts(self) -> list[tuple[int, int]]:
        """Where groups begin and end: powers of two of both lengths, and the bounds above."""
        sizes = _log2(self.lengths) * 64 + _log2(self.blocks)
        edges = [*np.flatnonzero(np.diff(sizes, prepend=-1)), len(sizes)]
        cuts: list[tuple[int, int]] = []
        for begin, end in pairwise(edges):
            keys = int(self.blocks[begin]) * self.batch.block_size  # the longest comes first
            queries = int(self.lengths[begin:end].max())
            most = max(1, min(GROUP_KEYS // keys, GROUP_SCORES // (keys * queries)))
            cuts += [(at, min(at + most, int(end))) for at in range(int(begin), int(end), most)]
        return cuts

    def _group(self, begin: int, end: int, first: int, positions: Ints, heads_per_kv: int) -> Group:
        batch = self.batch
        columns = np.arange(int(self.blocks[begin:end].max()))
        wanted = self.first_blocks[begin:end, None] + columns
        wanted = np.minimum(wanted, batch.block_tables.shape[1] - 1)
        table = batch.block_tables[self.rows[begin:end, None], wanted].astype(np.int64)
        table[columns >= self.blocks[begin:end, None]] = batch.null_block
        keys = len(columns) * batch.block_size
        mask = self._mask(self.first_blocks[begin:end] * batch.block_size, positions, keys)
        pieces, queries = positions.shape
        if queries > 1:  # the heads that share a KV head stand side by side as queries
            mask = mask[:, None].expand(-1, heads_per_kv, -1, -1).flatten(1, 2)
        return Group(first, pieces, queries, keys, batch._upload(table.reshape(-1)), mask[None])

    def _mask(self, key_firsts: Ints, positions: Ints, keys: int) -> Tensor:
        """[pieces, queries, keys]."""
        batch = self.batch
        key = batch._upload(key_firsts)[:, None, None] + torch.arange(keys, device=batch.device)
        query = batch._upload(positions)[:, :, None]
        hidden = key > query
        if self.window:
            hidden |= key <= query - self.window
        mask = torch.zeros(hidden.shape, dtype=batch.dtype, device=batch.device)
        return mask.masked_fill_(hidden, float("-inf"))


def _log2(sizes: Ints) -> Ints:
    """The exponent of the least power of two that is not below."""
    return np.ceil(np.log2(sizes)).astype(np.int64)

"""KV blocks with memory: a block that comes free keeps its content until its place is needed.

A block is always in exactly one of three states:

    in use        _references[block] > 0: it stands in so many sequences' block tables
    free, cached  in _unreferenced, the first to be evicted first; its digest leads to it
    free, blank   in _blank

A block in use has a digest too, once it is registered, and from then on nobody writes to it: it is
full, and rows write only at positions that were not confirmed when they were planned. Sequences
that compute the same content at the same time each have a block with its digest; `_blocks` leads
to one of them, and of those that come free only one stays cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.scheduler.hashing import Digest


@dataclass(slots=True)
class PrefixCacheStats:
    """Totals since the start; they outlive the pool."""

    queries: int = 0  # tokens of the sequences that were looked up
    hits: int = 0  # tokens of them that were found
    evictions: int = 0  # blocks


class CachingBlockPool:
    """Hands out block ids 0 .. num_blocks-1, and finds the blocks that hold a known prefix."""

    def __init__(self, num_blocks: int, stats: PrefixCacheStats | None = None) -> None:
        self.num_blocks = num_blocks
        self.stats = stats if stats is not None else PrefixCacheStats()
        self._references = [0] * num_blocks
        self._digests: list[Digest | None] = [None] * num_blocks
        self._blocks: dict[Digest, int] = {}
        self._blank = list(reversed(range(num_blocks)))
        self._unreferenced: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give, cached or blank."""
        return len(self._blank) + len(self._unreferenced)

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def lookup(self, digests: Iterable[Digest]) -> list[int]:
        """The blocks of the longest run of cached digests from the start. Takes nothing."""
        found: list[int] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these `num_free` counts, and would not after `acquire`."""
        return sum(self._references[block] == 0 for block in blocks)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Share the blocks that `lookup` found just before, for one more sequence."""
        for block in blocks:
            if self._references[block] == 0:
                del self._unreferenced[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """`count` blocks to write to; the caller has checked that so many are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int, digest: Digest) -> None:
        """Let others find a block in use, by what was computed into it.

        To be called only when the result that covers all its tokens is back: what is merely
        planned may be discarded.
        """
        if self._references[block] == 0 or self._digests[block] not in (None, digest):
            raise ValueError(f"block {block} cannot be registered")
        self._digests[block] = digest
        self._blocks.setdefault(digest, block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """A sequence needs its blocks no more; `blocks` in the order of its block table.

        A prefix is worth nothing without its start, so what comes last is evicted first.
        """
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._keep(block)

    def _keep(self, block: int) -> None:
        """Cache a block that came free, if it holds what no other does."""
        digest = self._digests[block]
        if digest is None:
            self._blank.append(block)
            return
        known = self._blocks.setdefault(digest, block)
        if known == block:
            self._unreferenced[block] = None
            return
        if known in self._unreferenced:  # it stands in for this one, so it is as young
            self._unreferenced.move_to_end(known)
        self._digests[block] = None
        self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._unreferenced.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        del self._blocks[digest]
        self._digests[block] = None
        self.stats.evictions += 1
        return block

"""KV blocks: who has which. Every block is either free or in exactly one sequence's table."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids 0 .. num_blocks-1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that are taken, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def take(self, count: int) -> list[int]:
        """`count` blocks; the caller has checked that so many are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)

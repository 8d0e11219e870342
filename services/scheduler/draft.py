"""A plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import NEWEST, EnteringSequence, Plan
from shared.types import Int32s, int32s


@dataclass(slots=True)
class Draft:
    """What the next iteration computes, as far as it is decided."""

    budget: int  # tokens that may still be added
    lease: int  # iterations
    jump: int  # tokens
    preempted: int = 0  # sequences, for its sake
    entering: list[EnteringSequence] = field(default_factory=list)
    block_slots: Int32s = field(default_factory=int32s)
    block_counts: Int32s = field(default_factory=int32s)
    block_ids: Int32s = field(default_factory=int32s)
    row_slots: Int32s = field(default_factory=int32s)
    row_starts: Int32s = field(default_factory=int32s)
    row_tokens: Int32s = field(default_factory=int32s)

    @property
    def open(self) -> bool:
        """Whether others may be admitted with it."""
        return self.budget > 0 and not self.lease and not self.preempted

    def grant(self, slot: int, blocks: list[int]) -> None:
        """Append blocks to a slot's table."""
        self.block_slots.append(slot)
        self.block_counts.append(len(blocks))
        self.block_ids.extend(blocks)

    def add_decodes(self, slots: Int32s) -> None:
        """A row for the newest token of each."""
        self.row_slots.extend(slots)
        self.row_starts.extend(int32s([NEWEST]) * len(slots))
        self.row_tokens.extend(int32s([1]) * len(slots))
        self.budget -= len(slots)

    def add_chunk(self, slot: int, start: int, count: int) -> None:
        """A row for `count` tokens of known content."""
        self.row_slots.append(slot)
        self.row_starts.append(start)
        self.row_tokens.append(count)
        self.budget -= count

    def finish(self, step: int, retired: Int32s, session: int) -> Plan:
        return Plan(
            step=step,
            retired=retired,
            entering=self.entering,
            block_slots=self.block_slots,
            block_counts=self.block_counts,
            block_ids=self.block_ids,
            row_slots=self.row_slots,
            row_starts=self.row_starts,
            row_tokens=self.row_tokens,
            lease=self.lease if self.row_slots else 0,
            session=session,
            jump=self.jump if self.row_slots else 0,
        )

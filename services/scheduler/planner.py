"""Forming plans: what the next iteration computes, under the token budget and the KV blocks.

Decodes come first, then the prefills that are under way, then admissions; beside decodes, prefills
get no more tokens than `Pace` allows, so that streams are not held up. A sequence takes the
blocks of all its known tokens when it is admitted, those of its beginning with their content if
they are cached, so only decodes ever need more. When there are none, a victim (`choose_victim`)
gives its blocks up and is computed again later; any accepted sequence fits alone, so there is
always progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeAlias

from services.scheduler.draft import Draft
from services.scheduler.in_flight import InFlight
from services.scheduler.pace import Pace
from services.scheduler.policy import FairQueue, choose_victim
from services.scheduler.prefix_cache import CachingBlockPool, PrefixCacheStats
from services.scheduler.prefixes import Prefixes
from services.scheduler.sequence import NO_SLOT, Sequence
from shared.messages import Announce, Plan
from shared.types import int32s

Waiting: TypeAlias = FairQueue[Sequence]


class Planner:
    """The running set and its memory on one executor."""

    def __init__(
        self,
        capacity: Announce,
        steps: Iterator[int],
        in_flight: InFlight,
        pace: Pace,
        *,
        max_lease: int,
        prefix_caching: bool,
        cache_stats: PrefixCacheStats,
    ) -> None:
        self.capacity = capacity
        self.pool = CachingBlockPool(capacity.num_blocks, cache_stats)
        self.prefixes = Prefixes(capacity, self.pool, enabled=prefix_caching)
        self.pace = pace
        self.running: dict[int, Sequence] = {}  # by handle, in the order of their admission
        self.preemptions = 0
        self._free_slots = list(reversed(range(capacity.max_num_seqs)))
        self._retired = int32s()  # slots given up since the last plan
        self._steps = steps
        self._in_flight = in_flight
        self._max_lease = max_lease

    @property
    def max_tokens_held(self) -> int:
        """Tokens whose KV fits into the whole cache."""
        return self.capacity.num_blocks * self.capacity.block_size

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: of its last one the KV is never stored."""
        return min(self.capacity.max_model_len, self.max_tokens_held + 1)

    def news(self, waiting: Waiting) -> bool:
        """Whether a lease should be cut short: somebody left, or somebody can come in."""
        return len(self._retired) > 0 or self._next(waiting) is not None

    def plan(self, waiting: Waiting) -> Plan | None:
        """The next iteration; None if there is nothing to compute."""
        draft = Draft(self.capacity.max_num_batched_tokens, self._lease(waiting))
        preemptions = self.preemptions
        others = self._decode(draft, waiting)
        unread = len(others) + min(len(waiting), len(self._free_slots))
        draft.budget = self.pace.allowance(draft.budget, len(draft.row_slots), unread)
        for sequence in others:
            if sequence.running:  # no victim of a decode
                self._add_row(sequence, draft)
        if self.preemptions == preemptions:
            self._admit(waiting, draft)
        if not draft.row_slots and not (self._retired and self._in_flight.leased):
            return None
        retired, self._retired = self._retired, int32s()
        return draft.finish(next(self._steps), retired, self.capacity.session)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch. Its slot and blocks go only to later plans."""
        del self.running[sequence.handle]
        self._retired.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        self.pool.give_back(sequence.blocks)
        sequence.slot = NO_SLOT
        sequence.blocks = []

    def preempt(self, sequence: Sequence, waiting: Waiting) -> None:
        """Put a running sequence back into the queue, to be computed again."""
        self.release(sequence)
        sequence.num_computed = sequence.num_registered = 0
        sequence.num_tokens = len(sequence.token_ids)
        sequence.held_step = self._in_flight.last_step
        waiting.put_back(sequence)
        self.preemptions += 1

    def _lease(self, waiting: Waiting) -> int:
        """Iterations that the executor may repeat: only decodes, and from spare blocks only."""
        rows = len(self.running)
        if not rows or not self._max_lease or rows > self.capacity.max_num_batched_tokens:
            return 0
        if not all(s.decoding for s in self.running.values()) or self._next(waiting) is not None:
            return 0
        lease = self._max_lease
        ahead, block_size = self._in_flight.leased, self.capacity.block_size
        while lease and 2 * rows * ((ahead + lease) // block_size + 2) > self.pool.num_free:
            lease //= 2
        return lease

    def _decode(self, draft: Draft, waiting: Waiting) -> list[Sequence]:
        """Rows for all that lack only their newest token; returns the others.

        Nearly all rows are made here, so it does by hand what `decoding` and `_add_row` say.
        """
        block_size = self.capacity.block_size
        slots = int32s()
        ahead = self._in_flight.leased + draft.lease + 1  # at most so many tokens from `at` on
        others = []
        self._make_room(ahead, draft.budget, waiting)
        for sequence in self.running.values():
            at = sequence.num_computed
            if at < sequence.num_prompt or at + 1 != sequence.num_tokens:
                others.append(sequence)
                continue
            if at >= sequence.num_inputs or len(slots) == draft.budget:
                continue
            end = min(at + ahead, sequence.num_inputs)
            if end > len(sequence.blocks) * block_size:
                missing = sequence.blocks_needed(end, block_size)
                self._grant(sequence, self.pool.take(missing), draft)
            slots.append(sequence.slot)
            sequence.num_computed = at + 1
            sequence.num_tokens = at + 2
        draft.add_decodes(slots)
        return others

    def _make_room(self, ahead: int, rows: int, waiting: Waiting) -> None:
        """See that all decodes get their blocks, at the cost of others, before any has its row.

        ahead: tokens that each may compute at most; rows: of so many decodes at most.
        """
        block_size = self.capacity.block_size
        most = -(-ahead // block_size)
        while len(self.running) * most > self.pool.num_free:
            ends = (
                (sequence, min(sequence.num_computed + ahead, sequence.num_inputs))
                for sequence in self.running.values()
                if sequence.decoding and sequence.num_pending
            )
            missing = sum(
                max(0, sequence.blocks_needed(end, block_size))
                for sequence, end in islice(ends, rows)
            )
            if missing <= self.pool.num_free:
                return
            self.preempt(choose_victim(self.running.values()), waiting)

    def _next(self, waiting: Waiting) -> tuple[Sequence, list[int]] | None:
        """The first that waits, and its cached blocks, if it can be given a slot and the others."""
        if not waiting or not self._free_slots:
            return None
        running, free = len(self.running), self.pool.num_free
        if running and running >= free:
            return None
        sequence = waiting.first
        if not self._in_flight.done(sequence.held_step):
            return None
        found = self.prefixes.find(sequence)
        if running:
            needed = sequence.blocks_needed(sequence.num_tokens, self.capacity.block_size)
            needed += self.pool.count_free(found) - len(found)
            # One block of headroom for each that runs, else the newcomer is soon a victim.
            if needed + running > free:
                return None
        return sequence, found

    def _admit(self, waiting: Waiting, draft: Draft) -> None:
        while draft.budget > 0 and (chosen := self._next(waiting)) is not None:
            sequence, found = chosen
            waiting.remove(sequence)
            self._enter(sequence, found, draft)
            if sequence.admissions == 1:
                self._count(sequence, waiting)
            self._add_row(sequence, draft)

    def _enter(self, sequence: Sequence, found: list[int], draft: Draft) -> None:
        """Give it a slot, and blocks: those found, which go first, before others are evicted."""
        block_size = self.capacity.block_size
        self.pool.acquire(found)
        needed = sequence.blocks_needed(sequence.num_tokens, block_size) - len(found)
        sequence.slot = self._free_slots.pop()
        sequence.admissions += 1
        sequence.num_registered = len(found)
        sequence.num_computed = len(found) * block_size
        self.running[sequence.handle] = sequence
        draft.entering.append(sequence.entering())
        self._grant(sequence, found + self.pool.take(needed), draft)

    def _count(self, sequence: Sequence, waiting: Waiting) -> None:
        """What a first admission costs its tenant, and saves."""
        sequence.num_cached = sequence.num_computed
        self.pool.stats.queries += sequence.num_tokens
        self.pool.stats.hits += sequence.num_cached
        computed = sequence.num_tokens - sequence.num_cached
        waiting.served(sequence.tenant, input_tokens=computed)

    def _grant(self, sequence: Sequence, blocks: list[int], draft: Draft) -> None:
        sequence.blocks += blocks
        draft.grant(sequence.slot, blocks)

    def _add_row(self, sequence: Sequence, draft: Draft) -> None:
        count = min(sequence.num_pending, draft.budget)
        if count <= 0:
            return
        draft.add_chunk(sequence.slot, sequence.num_computed, count)
        sequence.num_computed += count
        if sequence.num_computed == sequence.num_tokens:
            sequence.num_tokens += 1  # the row samples

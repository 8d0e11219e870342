"""Forming plans: what the next iteration computes, under the token budget and the KV blocks.

Decodes come first, then the prefills that are under way, then admissions; beside decodes, prefills
get no more tokens than `Pace` allows, so that streams are not held up. A sequence takes the
blocks of all its known tokens when it is admitted, those of its beginning with their content if
they are cached, so only decodes ever need more. When there are none, a victim (`choose_victim`)
gives its blocks up and is computed again later; any accepted sequence fits alone, so there is
always progress.

Leases, and jumps through what grammars force, take no more than spare blocks. How far a sequence
has jumped is not known before its results are back, so it has blocks for the farthest.
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

JUMP = 8  # tokens that an iteration may take beside the one it samples: about a key of JSON

Waiting: TypeAlias = FairQueue[Sequence]


class Planner:
    """The running set and its memory on one executor."""

    def __init__(
        self,
        name: str,
        capacity: Announce,
        steps: Iterator[int],
        in_flight: InFlight,
        pace: Pace,
        *,
        max_lease: int,
        prefix_caching: bool,
        cache_stats: PrefixCacheStats,
    ) -> None:
        self._name = name
        self.capacity = capacity
        self.pool = CachingBlockPool(capacity.num_blocks, cache_stats)
        self.prefixes = Prefixes(capacity, self.pool, enabled=prefix_caching)
        self.pace = pace
        self.running: dict[int, Sequence] = {}  # by handle, in the order of their admission
        self.jumping: dict[int, Sequence] = {}  # those of them that may jump
        self._free_slots = list(reversed(range(capacity.max_num_seqs)))
        self._retired = int32s()  # slots given up since the last plan
        self._steps = steps
        self._in_flight = in_flight
        self._max_lease = max_lease

    @property
    def has_retired(self) -> bool:
        """Whether the executor is to hear of slots that came free."""
        return len(self._retired) > 0

    @property
    def has_room(self) -> bool:
        """Whether anybody could come in, however short."""
        running = len(self.running)
        return bool(self._free_slots) and (not running or running < self.pool.num_free)

    @property
    def backlog(self) -> int:
        """Tokens of prompts still to be computed."""
        return sum(one.num_pending for one in self.running.values() if not one.decoding)

    @property
    def load(self) -> float:
        """How full it is, 0 to 1."""
        return max(len(self.running) / self.capacity.max_num_seqs, self.pool.usage)

    def begin(self, waiting: Waiting, *, invites: bool) -> Draft:
        """The next iteration, with all that runs; it `invites` if others are to be admitted."""
        jump = JUMP if self.jumping and self._spare(1 + JUMP + self._in_flight.jumps) else 0
        lease = 0 if invites else self._lease(jump)
        draft = Draft(self.capacity.max_num_batched_tokens, lease, jump)
        others = self._decode(draft, waiting)
        unread = len(others) + min(len(waiting), len(self._free_slots))
        draft.budget = self.pace.allowance(draft.budget, len(draft.row_slots), unread)
        for sequence in others:
            if sequence.running:  # no victim of a decode
                self._add_row(sequence, draft)
        return draft

    def room_for(self, sequence: Sequence) -> list[int] | None:
        """Its cached blocks, if it can be given a slot and the others; else None."""
        if not self.has_room:
            return None
        found = self.prefixes.find(sequence)
        if running := len(self.running):
            needed = sequence.blocks_needed(sequence.num_tokens, self.capacity.block_size)
            needed += self.pool.count_free(found) - len(found)
            # One block of headroom for each that runs, else the newcomer is soon a victim.
            if needed + running > self.pool.num_free:
                return None
        return found

    def admit(self, sequence: Sequence, found: list[int], draft: Draft, waiting: Waiting) -> None:
        """Take in one that waits, just after `room_for`."""
        waiting.remove(sequence)
        self._enter(sequence, found, draft)
        if sequence.fresh:
            self._count(sequence, waiting)
        self._add_row(sequence, draft)

    def finish(self, draft: Draft) -> Plan | None:
        """The plan; None if there is nothing to compute, nor to tell."""
        if not draft.row_slots and not (self._retired and self._in_flight.leased):
            return None
        retired, self._retired = self._retired, int32s()
        return draft.finish(next(self._steps), retired, self.capacity.session)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch. Its slot and blocks go only to later plans."""
        del self.running[sequence.handle]
        self.jumping.pop(sequence.handle, None)
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
        sequence.fence = self._in_flight.fence
        waiting.put_back(sequence)

    def _spare(self, ahead: int) -> bool:
        """Whether all that run can be given blocks for so many more tokens, and leave as many."""
        blocks = (self._in_flight.leased + ahead - 1) // self.capacity.block_size + 2
        return 2 * len(self.running) * blocks <= self.pool.num_free

    def _lease(self, jump: int) -> int:
        """Iterations that the executor may repeat: only decodes, and from spare blocks only."""
        rows = len(self.running)
        if not rows or not self._max_lease or rows > self.capacity.max_num_batched_tokens:
            return 0
        if not all(sequence.decoding for sequence in self.running.values()):
            return 0
        lease = self._max_lease // (1 + jump)  # so it costs no more blocks
        while lease and not self._spare((1 + lease) * (1 + jump) + self._in_flight.jumps):
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
        jumps = self._in_flight.jumps + draft.jump * (draft.lease + 1) if self.jumping else 0
        self._make_room(ahead, jumps, draft, waiting)
        if jumps:
            self._clear_way(ahead + jumps, draft)
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

    def _make_room(self, ahead: int, jumps: int, draft: Draft, waiting: Waiting) -> None:
        """See that all decodes get their blocks, at the cost of others, before any has its row.

        ahead: tokens that each may compute at most; jumps: and so many more those that jump.
        """
        most = -(-(ahead + jumps) // self.capacity.block_size)
        while len(self.running) * most > self.pool.num_free:
            decoding = self._decoding(draft.budget)
            missing = sum(max(0, self._missing(s, ahead + s.jumps * jumps)) for s in decoding)
            if missing <= self.pool.num_free:
                return
            self.preempt(choose_victim(self.running.values()), waiting)
            draft.preempted += 1

    def _clear_way(self, ahead: int, draft: Draft) -> None:
        """Give those that jump the blocks of so many tokens."""
        for sequence in self._decoding(draft.budget):
            if sequence.jumps and (missing := self._missing(sequence, ahead)) > 0:
                self._grant(sequence, self.pool.take(missing), draft)

    def _decoding(self, rows: int) -> Iterator[Sequence]:
        """Those that get so many rows of decodes."""
        running = self.running.values()
        return islice((s for s in running if s.decoding and s.num_pending > 0), rows)

    def _missing(self, sequence: Sequence, ahead: int) -> int:
        """Blocks for so many more tokens, of those that it may have; below 0: it has more."""
        end = min(sequence.num_computed + ahead, sequence.num_inputs)
        return sequence.blocks_needed(end, self.capacity.block_size)

    def _enter(self, sequence: Sequence, found: list[int], draft: Draft) -> None:
        """Give it a slot, and blocks: those found, which go first, before others are evicted."""
        block_size = self.capacity.block_size
        self.pool.acquire(found)
        needed = sequence.blocks_needed(sequence.num_tokens, block_size) - len(found)
        sequence.executor = self._name
        sequence.slot = self._free_slots.pop()
        sequence.admissions += 1
        sequence.num_registered = len(found)
        sequence.num_computed = len(found) * block_size
        self.running[sequence.handle] = sequence
        if sequence.jumps:
            self.jumping[sequence.handle] = sequence
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

"""The persistent batch: what the executor knows of each slot's sequence. Plans are its changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.sampling import SamplingColumns
from services.model_executor.adjustments import Adjustments
from services.model_executor.finish import FREE_SLOT, StopRules
from services.model_executor.jumps import NOTHING_FORCED, Forced, Jumps
from services.model_executor.wishes import Wishes
from shared.messages import NEWEST, Announce, EnteringSequence, Plan
from shared.types import Int32s

Ints = NDArray[np.int64]


class PlanMisfit(Exception):
    """A plan that does not fit the batch; the text says why. The batch must be reset."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to run: int64 columns, one entry each."""

    slots: Ints
    starts: Ints
    counts: Ints
    sampling: Ints  # indices of the rows that sample
    positions: Ints  # of the tokens that they sample
    forced: Forced = NOTHING_FORCED  # tokens of rows that jump, told beside those

    @property
    def sampling_slots(self) -> Ints:
        return self.slots[self.sampling]

    @property
    def decode_tokens(self) -> int:
        """One for each sequence that goes on; what else it computes at once is as of a prompt."""
        return int(np.count_nonzero(self.counts[self.sampling] == 1)) + self.forced.num_rows

    @property
    def prefill_tokens(self) -> int:
        return int(self.counts.sum()) - self.decode_tokens


class PersistentBatch:
    """Tables with one line per slot.

    A slot's `length` counts the tokens that are told of or being sampled: a row that reaches it
    samples, and makes it one longer at once. So a plan may build on a token whose value is not
    there yet: it is read from `tokens`, where the sampler has put it by then. What a grammar
    forces stands there beyond the length: a row that reaches the length goes on through it, as far
    as it may, and samples only behind it. A finished slot is still taken until its scheduler
    retires it; its rows are not run.
    """

    def __init__(
        self,
        limits: Announce,
        eos_token_ids: frozenset[int],
        device: torch.device,
    ) -> None:
        slots = limits.max_num_seqs
        self.limits = limits
        # One more: after a full context a token is still sampled, though nobody gets it.
        width = limits.max_model_len + 1
        self.tokens = torch.zeros(slots, width, dtype=torch.int32, device=device)
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self.blocks = np.zeros((slots, max_blocks), np.int32)
        self.sampling = SamplingColumns.zeros(slots)
        self.adjustments = Adjustments(slots, limits.vocab_size, device)
        self.wishes = Wishes(slots)
        self.handles = np.zeros(slots, np.int32)
        self.detokenizers = [""] * slots
        self.rules = [FREE_SLOT] * slots
        self.num_running = 0  # sequences that have not finished
        self._jumps = Jumps(slots)
        self._eos_token_ids = eos_token_ids
        self._lengths = np.zeros(slots, np.int64)
        self._num_blocks = np.zeros(slots, np.int64)
        self._lasts = np.zeros(slots, np.int64)
        self._end_ids = np.zeros(limits.vocab_size, np.bool_)  # of any sequence there has been
        self._taken = np.zeros(slots, np.bool_)
        self._finished = np.zeros(slots, np.bool_)

    def reset(self) -> None:
        """Drop all sequences."""
        self._taken[:] = False
        self._jumps = Jumps(len(self.rules))
        self.rules = [FREE_SLOT] * len(self.rules)
        self.num_running = 0

    def apply(self, plan: Plan) -> None:
        """Make a plan's changes. Raises PlanMisfit."""
        for slot in plan.retired:
            self._retire(slot)
        for sequence in plan.entering:
            self._enter(sequence)
        self._append_blocks(plan)

    def force(self, forced: dict[int, list[int]]) -> None:
        """These tokens must come next, by slot; there is room for them and one more."""
        if not forced:
            return
        counts = [len(tokens) for tokens in forced.values()]
        slots = np.repeat(list(forced), counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        positions = self._lengths[slots] + np.arange(len(slots)) - firsts
        tokens = np.concatenate(list(forced.values())).astype(np.int32)
        where = torch.from_numpy(np.stack([slots, positions])).to(self.tokens.device)
        self.tokens[where[0], where[1]] = torch.from_numpy(tokens).to(self.tokens.device)
        for slot, own in forced.items():
            self._jumps.push(slot, own)

    def rows(self, plan: Plan) -> Rows:
        """A plan's rows, as they are now: those that decode go on from their newest tokens.

        Raises PlanMisfit.
        """
        slots, starts, counts = map(_ints, (plan.row_slots, plan.row_starts, plan.row_tokens))
        if len(slots) and (slots.min() < 0 or slots.max() >= len(self.rules)):
            raise PlanMisfit("a row of no slot")
        if len(set(plan.row_slots)) != len(slots) or not self._taken[slots].all():
            raise PlanMisfit("rows of a free slot, or two of one slot")
        running = ~self._finished[slots]
        slots, starts, counts = slots[running], starts[running], counts[running]
        lengths = self._lengths[slots]
        starts = np.where(starts == NEWEST, lengths - 1, starts)
        ends = starts + counts
        if (starts < 0).any() or (counts < 1).any() or (ends > lengths).any():
            raise PlanMisfit("a row outside its sequence")
        left = self.limits.max_num_batched_tokens - int(counts.sum())
        if left < 0:
            raise PlanMisfit(f"{counts.sum()} tokens")
        telling = np.flatnonzero(ends == lengths)
        positions = lengths[telling]
        rows = Rows(slots, starts, counts, telling, positions)
        if self._jumps:
            rows = self._jump(rows, plan.jump, left)
            ends = starts + rows.counts
        if (ends > self._num_blocks[slots] * self.limits.block_size).any():
            raise PlanMisfit("a row outside its blocks")
        self._lengths[slots[telling]] += 1
        return rows

    def _jump(self, rows: Rows, most: int, budget: int) -> Rows:
        """Rows that go on through what is forced: by `most` tokens each, and `budget` together."""
        telling, slots, lengths = rows.sampling, rows.sampling_slots, rows.positions
        extras, sampling = self._jumps.extras(slots, most, budget)
        counts = rows.counts.copy()
        counts[telling] += extras
        self._lengths[slots] += extras
        return Rows(
            slots=rows.slots,
            starts=rows.starts,
            counts=counts,
            sampling=telling[sampling],
            positions=(lengths + extras)[sampling],
            forced=self._jumps.take(telling, slots, lengths, extras),
        )

    def finish(self, slot: int) -> None:
        """The sequence in this slot has sampled its last token."""
        self._finished[slot] = True
        self.num_running -= 1

    def may_end(self, rows: Rows, tokens: Ints) -> NDArray[np.bool_]:
        """Which of the sampling rows may end with these tokens; of the others it is certain."""
        last: NDArray[np.bool_] = rows.positions >= self._lasts[rows.sampling_slots]
        return last | self._end_ids[tokens]

    def _retire(self, slot: int) -> None:
        self._check_taken(slot)
        self.num_running -= not self._finished[slot]
        self._taken[slot] = False
        self._jumps.clear(slot)
        self.rules[slot] = FREE_SLOT

    def _enter(self, sequence: EnteringSequence) -> None:
        slot, length = sequence.slot, len(sequence.token_ids)
        if not 0 <= slot < len(self.rules) or self._taken[slot]:
            raise PlanMisfit(f"slot {slot} cannot be entered")
        room = self.limits.max_model_len - (not sequence.params.hidden_tokens)
        if not 1 <= sequence.prompt_tokens <= length <= room:
            raise PlanMisfit(f"{length} tokens, {sequence.prompt_tokens} of them prompt")
        ids = _ints(sequence.token_ids)
        if ids.min() < 0 or ids.max() >= self.limits.vocab_size:
            raise PlanMisfit("a token id outside the vocabulary")
        self.tokens[slot, :length] = torch.from_numpy(ids.astype(np.int32))
        self._lengths[slot] = length
        self._jumps.clear(slot)
        self._num_blocks[slot] = 0
        self._taken[slot] = True
        self._finished[slot] = False
        self.num_running += 1
        self._set_parameters(sequence)

    def _set_parameters(self, sequence: EnteringSequence) -> None:
        slot, params = sequence.slot, sequence.params
        rules = StopRules.of(
            params, sequence.prompt_tokens, self._eos_token_ids, self.limits.max_model_len
        )
        self.rules[slot] = rules
        self._lasts[slot] = rules.last
        vocab_size = self.limits.vocab_size
        self._end_ids[[token for token in rules.end_ids if 0 <= token < vocab_size]] = True
        self.handles[slot] = sequence.handle
        self.detokenizers[slot] = sequence.detokenizer
        self.sampling.greedy[slot] = params.greedy
        self.sampling.temperature[slot] = params.temperature
        self.sampling.top_p[slot] = params.top_p
        self.sampling.min_p[slot] = params.min_p
        self.sampling.top_k[slot] = params.top_k
        self.sampling.seed[slot] = params.seed
        self.adjustments.enter(slot, params, sequence.prompt_tokens, rules)
        self.wishes.enter(slot, params, sequence.prompt_tokens)

    def _append_blocks(self, plan: Plan) -> None:
        ids = _ints(plan.block_ids)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.limits.num_blocks):
            raise PlanMisfit("a block id outside the cache")
        if min(plan.block_counts, default=0) < 0:
            raise PlanMisfit("a negative count of blocks")
        at = 0
        for slot, count in zip(plan.block_slots, plan.block_counts, strict=True):
            self._check_taken(slot)
            first = self._num_blocks[slot]
            if first + count > self.blocks.shape[1]:
                raise PlanMisfit(f"{first} + {count} blocks in slot {slot}")
            self.blocks[slot, first : first + count] = ids[at : at + count]
            self._num_blocks[slot] += count
            at += count

    def _check_taken(self, slot: int) -> None:
        if not 0 <= slot < len(self.rules) or not self._taken[slot]:
            raise PlanMisfit(f"slot {slot} is free")


def _ints(column: Int32s) -> Ints:
    return np.frombuffer(column, np.int32).astype(np.int64)

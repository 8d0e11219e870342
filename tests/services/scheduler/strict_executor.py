"""A model executor that computes nothing and forgives nothing: the plan protocol, checked.

In place of KV its blocks hold, at each position, from which tokens it would have been computed.
So whatever a row reads of blocks that others filled must be what it would have computed itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shared.messages import NEWEST, Announce, EnteringSequence, Plan, StepResult
from shared.sampling import SamplingParams
from shared.types import FinishReason, Incarnation, int32s

VOCAB_SIZE = 49139  # a prime, and ids of the default model
EPOCH = Incarnation(1)
STOP_EVERY = 11  # one token in so many ends a sequence that does not ignore it
FREE_EVERY = 6  # one token in so many is not forced where a sequence jumps


def token_of(params: SamplingParams, position: int) -> int:
    """Sampling is a function of seed and position, whatever else happens."""
    return (params.seed * 7919 + position * 104729) % VOCAB_SIZE


def finish_of(params: SamplingParams, prompt_tokens: int, position: int) -> FinishReason:
    assert params.max_tokens is not None
    if params.hidden_tokens:
        return FinishReason.LENGTH
    if not params.ignore_eos and token_of(params, position) % STOP_EVERY == 0:
        return FinishReason.STOP
    if position - prompt_tokens + 1 == params.max_tokens:
        return FinishReason.LENGTH
    return FinishReason.NONE


def forced_after(params: SamplingParams, prompt_tokens: int, length: int) -> int:
    """How many tokens are forced from this length on, before one that is to be sampled."""
    position = length
    while (
        params.jumps
        and token_of(params, position) % FREE_EVERY
        and not finish_of(params, prompt_tokens, position)
    ):
        position += 1
    return position - length


@dataclass(slots=True)
class Occupant:
    """A sequence in a slot, as plans have described it."""

    entered: EnteringSequence
    given: int  # tokens that it entered with
    kv: list[int]  # for each token known, those under way included, what its KV depends on
    computed: int | None = None  # tokens; None before the first row
    blocks: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def known(self) -> int:
        return len(self.kv)

    @property
    def forced(self) -> int:
        """Tokens that a row may compute beyond those known: none before it has sampled."""
        if self.known == self.given:
            return 0
        return forced_after(self.entered.params, self.entered.prompt_tokens, self.known)

    def learn(self, token: int) -> None:
        self.kv.append(hash((self.kv[-1] if self.kv else None, token)))


class StrictExecutor:
    """Holds what `capacity` says; `execute` raises AssertionError for a plan that breaks a rule."""

    def __init__(self, capacity: Announce, *, ahead: bool = False) -> None:
        self.capacity = capacity
        self.ahead = ahead  # plans may come before the results that they build on
        self.slots: dict[int, Occupant] = {}
        self.steps: list[int] = []
        self.entered: list[int] = []  # handles, in order
        self.computed = 0  # tokens
        self._memory: list[list[int | None]] = [
            [None] * capacity.block_size for _ in range(capacity.num_blocks)
        ]

    @property
    def blocks_held(self) -> list[int]:
        return [block for occupant in self.slots.values() for block in occupant.blocks]

    def execute(self, plan: Plan) -> StepResult:
        """Check a plan and answer as a model would whose tokens depend on seed and position."""
        assert not self.steps or plan.step > self.steps[-1]
        assert plan.session == self.capacity.session
        self.steps.append(plan.step)
        for slot in plan.retired:
            del self.slots[slot]  # KeyError: it was not taken
        for entering in plan.entering:
            self._enter(entering)
        self._grant(plan)
        return self._run(plan)

    def repeat(self, plan: Plan, iteration: int) -> StepResult:
        """Run a leased plan's rows once more."""
        assert 0 < iteration <= plan.lease
        assert set(plan.row_starts) == {NEWEST}, "only decodes are leased"
        return replace(self._run(plan), iteration=iteration)

    def _enter(self, entering: EnteringSequence) -> None:
        length, params = len(entering.token_ids), entering.params
        assert 0 <= entering.slot < self.capacity.max_num_seqs
        assert entering.slot not in self.slots
        assert entering.handle not in {o.entered.handle for o in self.slots.values()}
        assert params.max_tokens is not None
        assert 1 <= entering.prompt_tokens <= length
        room = entering.prompt_tokens + params.max_tokens
        assert length < room + params.hidden_tokens
        assert room <= self.capacity.max_model_len
        for position in range(entering.prompt_tokens, length):
            assert entering.token_ids[position] == token_of(params, position)
            assert not finish_of(params, entering.prompt_tokens, position)
        occupant = self.slots[entering.slot] = Occupant(entering, length, kv=[])
        for token in entering.token_ids:
            occupant.learn(token)
        self.entered.append(entering.handle)

    def _grant(self, plan: Plan) -> None:
        blocks = iter(plan.block_ids)
        assert len(set(plan.block_slots)) == len(plan.block_slots)
        for slot, count in zip(plan.block_slots, plan.block_counts, strict=True):
            assert count > 0
            self.slots[slot].blocks += [next(blocks) for _ in range(count)]
        for occupant in self.slots.values():
            assert len(set(occupant.blocks)) == len(occupant.blocks), "a block twice in a table"
            assert all(0 <= block < self.capacity.num_blocks for block in occupant.blocks)

    def _run(self, plan: Plan) -> StepResult:
        assert sum(plan.row_tokens) <= self.capacity.max_num_batched_tokens
        assert len(set(plan.row_slots)) == len(plan.row_slots)
        if not self.ahead:
            unfinished = {slot for slot, occupant in self.slots.items() if not occupant.finished}
            assert sorted(plan.row_slots) == sorted(unfinished), "each that runs gets one row"
        handles, positions, tokens, finishes = int32s(), int32s(), int32s(), bytearray()
        left = self.capacity.max_num_batched_tokens - sum(plan.row_tokens)
        rows = zip(plan.row_slots, plan.row_starts, plan.row_tokens, strict=True)
        for slot, start, count in rows:
            occupant = self.slots[slot]
            if occupant.finished:
                continue  # the scheduler could not know
            if start == NEWEST:
                start = occupant.known - 1
            self._check_row(occupant, start, count)
            extra, told = 0, 0
            if start + count == occupant.known:
                extra = min(occupant.forced, plan.jump, left)
                told = extra + 1
                left -= extra
            entered = occupant.entered
            for position in range(occupant.known, occupant.known + told):
                finish = finish_of(entered.params, entered.prompt_tokens, position)
                occupant.learn(token_of(entered.params, position))
                occupant.finished = finish is not FinishReason.NONE
                handles.append(entered.handle)
                positions.append(position)
                tokens.append(token_of(entered.params, position))
                finishes.append(finish)
            self._compute(occupant, start, count + extra)
        return StepResult(EPOCH, plan.step, handles, positions, tokens, bytes(finishes))

    def _check_row(self, occupant: Occupant, start: int, count: int) -> None:
        block_size = self.capacity.block_size
        if occupant.computed is None:
            assert start % block_size == 0, "only whole blocks are shared"
            assert start == 0 or occupant.entered.params.prompt_logprobs is None, "some untold"
        else:
            assert start == occupant.computed, "rows of a sequence follow one another"
        assert 1 <= count <= occupant.known - start
        if not self.ahead and not occupant.entered.params.jumps:
            assert len(occupant.blocks) == -(-occupant.known // block_size), "a block for nothing"

    def _compute(self, occupant: Occupant, start: int, count: int) -> None:
        """Read the KV of all tokens before, and write that of the row's own."""
        block_size, blocks = self.capacity.block_size, occupant.blocks
        assert start + count <= len(blocks) * block_size, "a position without its block"
        for position in range(start):
            kv = self._memory[blocks[position // block_size]][position % block_size]
            assert kv == occupant.kv[position], "KV of other tokens"
        written = {blocks[position // block_size] for position in range(start, start + count)}
        for other in self.slots.values():
            assert other is occupant or other.finished or written.isdisjoint(other.blocks), (
                "a shared block is written to"
            )
        for position in range(start, start + count):
            block, offset = blocks[position // block_size], position % block_size
            self._memory[block][offset] = occupant.kv[position]
        occupant.computed = start + count
        self.computed += count

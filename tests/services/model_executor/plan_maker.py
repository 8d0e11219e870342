"""A scheduler's part, by hand: plans for `ModelRunner.execute`, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.model_executor.results import StepOutput
from shared.messages import Announce, EnteringSequence, Plan, StepResult
from shared.sampling import SamplingParams
from shared.types import FinishReason, Handle, int32s


@dataclass(slots=True)
class Running:
    """A sequence as its scheduler sees it."""

    handle: Handle
    prompt_tokens: int
    params: SamplingParams
    tokens: list[int]
    detokenizer: str = "d0"
    slot: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


class PlanMaker:
    """Every running sequence gets a row while the budget lasts; blocks are dealt out at random."""

    def __init__(self, limits: Announce, jump: int = 0) -> None:
        self.limits = limits
        self.jump = jump
        self.step = 0
        self.running: dict[int, Running] = {}  # by slot
        self._free_slots = list(range(limits.max_num_seqs))[::-1]
        self._free_blocks = [7 * i % limits.num_blocks for i in range(limits.num_blocks)]
        if limits.num_blocks % 7 == 0:
            self._free_blocks = list(range(limits.num_blocks))
        self._entering: list[EnteringSequence] = []
        self._retired: list[int] = []

    def enter(self, sequence: Running) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.computed = 0
        self.running[sequence.slot] = sequence
        self._entering.append(
            EnteringSequence(
                sequence.slot,
                sequence.handle,
                sequence.detokenizer,
                sequence.prompt_tokens,
                sequence.params,
                int32s(sequence.tokens),
            )
        )

    def retire(self, sequence: Running) -> None:
        """Take it out; it may enter again and is computed again then."""
        del self.running[sequence.slot]
        self._retired.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        self._free_blocks += sequence.blocks
        sequence.blocks = []

    def plan(self, order: Iterable[Running] | None = None) -> Plan:
        budget = self.limits.max_num_batched_tokens
        grants: list[tuple[int, list[int]]] = []
        rows: list[tuple[int, int, int]] = []
        for sequence in self.running.values() if order is None else order:
            count = min(budget, len(sequence.tokens) - sequence.computed)
            if count == 0:
                continue
            budget -= count
            rows.append((sequence.slot, sequence.computed, count))
            sequence.computed += count
            ahead = sequence.computed + self.jump
            missing = -(-ahead // self.limits.block_size) - len(sequence.blocks)
            if missing > 0:
                granted = [self._free_blocks.pop(0) for _ in range(missing)]
                sequence.blocks += granted
                grants.append((sequence.slot, granted))
        self.step += 1
        plan = Plan(
            step=self.step,
            retired=int32s(self._retired),
            entering=self._entering,
            block_slots=int32s(slot for slot, _ in grants),
            block_counts=int32s(len(blocks) for _, blocks in grants),
            block_ids=int32s(block for _, blocks in grants for block in blocks),
            row_slots=int32s(slot for slot, _, _ in rows),
            row_starts=int32s(start for _, start, _ in rows),
            row_tokens=int32s(count for _, _, count in rows),
            session=self.limits.session,
            jump=self.jump,
        )
        self._retired, self._entering = [], []
        return plan

    def take(self, output: StepOutput) -> None:
        self.take_result(output.scheduler)

    def take_result(self, result: StepResult) -> None:
        """Note the tokens; retire what finished."""
        assert result.step == self.step
        by_handle = {sequence.handle: sequence for sequence in self.running.values()}
        for handle, position, token, finish in zip(
            result.handles, result.positions, result.token_ids, result.finishes, strict=True
        ):
            sequence = by_handle[Handle(handle)]
            assert position == len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.computed = max(sequence.computed, position)
            sequence.finish = FinishReason(finish)
            if finish:
                self.retire(sequence)

"""Taking in what executors sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.scheduler.engine import Engine
from services.scheduler.planner import Waiting
from services.scheduler.sequence import NO_SLOT, Sequence
from shared.messages import StepResult


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    late_tokens: int = 0  # of requests that ended meanwhile
    preemptions: int = 0
    leases: int = 0  # plans that bore one


class Intake:
    """Adds tokens to their sequences, and ends those that have their last one."""

    def __init__(
        self,
        known: Mapping[int, Sequence],  # by handle
        waiting: Waiting,
        counters: Counters,
        drop: Callable[[Sequence], None],
    ) -> None:
        self._known = known
        self._waiting = waiting
        self._counters = counters
        self._drop = drop

    def take(self, result: StepResult, engine: Engine) -> None:
        """The result of an iteration of this executor that was under way."""
        known, counters, prefixes = self._known, self._counters, engine.planner.prefixes
        block_size, unplanned = prefixes.block_size, result.iteration > 0
        jumping, newest = bool(engine.planner.jumping), 0  # no handle is 0
        tenants = []  # one for each token
        hidden = 0  # tokens that only end their sequence
        for handle, position, token, finish in zip(
            result.handles, result.positions, result.token_ids, result.finishes, strict=True
        ):
            sequence = known.get(handle)
            if sequence is None or position != len(sequence.token_ids):
                continue
            if finish and not sequence.opened:
                continue  # nobody heard of its end, so that has to come again
            if position == sequence.num_prompt:
                counters.prompt_tokens += position
            sequence.token_ids.append(token)
            if sequence.slot == NO_SLOT:  # preempted meanwhile: one less to be computed again
                sequence.num_tokens += 1
            elif unplanned or (jumping and handle == newest):  # that one was planned
                sequence.num_computed += 1
                sequence.num_tokens += 1
            newest = handle
            tenants.append(sequence.tenant)
            if position // block_size > sequence.num_registered and sequence.slot != NO_SLOT:
                prefixes.register(sequence, position)
            if finish:  # any FinishReason but NONE
                hidden += sequence.asked.hidden_tokens
                self._drop(sequence)
        counters.late_tokens += len(result.handles) - len(tenants)
        counters.generation_tokens += len(tenants) - hidden
        for tenant, tokens in Counter(tenants).items():
            self._waiting.served(tenant, output_tokens=tokens)

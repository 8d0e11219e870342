"""Rows that go on through what is forced: how far, and what they tell."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.model_executor.batch import PersistentBatch, PlanMisfit, Rows
from shared.messages import NEWEST, Announce, EnteringSequence, Plan
from shared.sampling import SamplingParams
from shared.types import Handle, int32s

SLOTS, BLOCK, BUDGET = 4, 4, 16
LIMITS = Announce("m", 80, BLOCK, SLOTS, BUDGET, 70, 1000)
PROMPT = [7, 8, 9]


def make_plan(blocks: int = 0, *, enter: bool = False, jump: int = 0) -> Plan:
    """A row for every slot, and for each so many blocks."""
    slots = range(SLOTS)
    params = SamplingParams(seed=0)
    entering = [
        EnteringSequence(slot, Handle(1 + slot), "d", len(PROMPT), params, int32s(PROMPT))
        for slot in slots
    ]
    granted = slots if blocks else ()
    return Plan(
        step=1,
        retired=int32s(),
        entering=entering if enter else [],
        block_slots=int32s(granted),
        block_counts=int32s([blocks] * len(granted)),
        block_ids=int32s(range(blocks * len(granted))),
        row_slots=int32s(slots),
        row_starts=int32s([0 if enter else NEWEST] * SLOTS),
        row_tokens=int32s([len(PROMPT) if enter else 1] * SLOTS),
        jump=jump,
    )


def make_batch(blocks: int) -> PersistentBatch:
    """All slots have read their prompts and sampled one token."""
    batch = PersistentBatch(LIMITS, frozenset(), torch.device("cpu"))
    plan = make_plan(blocks, enter=True)
    batch.apply(plan)
    batch.rows(plan)
    return batch


def told(rows: Rows) -> dict[int, list[int]]:
    """Positions of tokens, by slot: those forced, then those sampled."""
    made: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    for row, position in zip(rows.forced.rows, rows.forced.positions, strict=True):
        made[int(rows.slots[row])].append(int(position))
    for slot, position in zip(rows.sampling_slots, rows.positions, strict=True):
        made[int(slot)].append(int(position))
    return made


@settings(max_examples=100, deadline=None)
@given(
    pushes=st.lists(st.lists(st.integers(0, 7), min_size=SLOTS, max_size=SLOTS), max_size=5),
    jumps=st.lists(st.integers(0, 9), min_size=6, max_size=6),
)
def test_each_row_tells_what_it_computes_and_one_token_more(
    pushes: list[list[int]], jumps: list[int]
) -> None:
    batch = make_batch(blocks=17)
    lengths, left = [4] * SLOTS, [0] * SLOTS
    for index, jump in enumerate(jumps):
        # Only what has sampled is forced to anything.
        push = pushes[index] if index < len(pushes) else [0] * SLOTS
        new = {s: list(range(500, 500 + n)) for s, n in enumerate(push) if n and not left[s]}
        batch.force(new)
        for slot, tokens in new.items():
            left[slot] = len(tokens)
            at = lengths[slot]
            assert batch.tokens[slot, at : at + len(tokens)].tolist() == tokens
        wanted = sum(min(jump, count) for count in left)
        rows = batch.rows(make_plan(jump=jump))
        assert rows.starts.tolist() == [length - 1 for length in lengths]
        extras = (rows.counts - 1).tolist()
        assert sum(extras) == min(wanted, BUDGET - SLOTS)
        for slot, positions in told(rows).items():
            assert 0 <= extras[slot] <= min(jump, left[slot])
            assert positions == list(range(lengths[slot], lengths[slot] + extras[slot] + 1))
            assert (slot in rows.sampling_slots) == (extras[slot] == left[slot])
            lengths[slot] += len(positions)
            left[slot] = max(0, left[slot] - len(positions))
        assert (rows.decode_tokens, rows.prefill_tokens) == (SLOTS, sum(extras))


def test_what_is_forced_stays_where_it_was_put() -> None:
    batch = make_batch(blocks=5)
    batch.force({1: [11, 12, 13], 3: [14]})
    rows = batch.rows(make_plan(jump=1))
    assert rows.forced.tokens.tolist() == [11, 12, 14]
    rows = batch.rows(make_plan(jump=1))
    assert rows.forced.tokens.tolist() == [13]
    assert not batch.rows(make_plan(jump=1)).forced.num_rows


def test_a_jump_beyond_its_blocks_does_not_fit() -> None:
    batch = make_batch(blocks=1)
    batch.force({0: [11]})
    with pytest.raises(PlanMisfit, match="blocks"):
        batch.rows(make_plan(jump=1))


def test_nothing_is_left_to_who_comes_next() -> None:
    batch = make_batch(blocks=5)
    batch.force({0: [11]})
    batch.reset()
    plan = make_plan(5, enter=True, jump=8)
    batch.apply(plan)
    assert not batch.rows(plan).forced.num_rows
    assert not batch.rows(make_plan(jump=8)).forced.num_rows

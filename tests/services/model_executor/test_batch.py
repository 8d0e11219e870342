"""The persistent batch against a dictionary of sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.model_executor.batch import PersistentBatch, PlanMisfit, Rows
from shared.messages import Announce, EnteringSequence, Plan
from shared.sampling import SamplingParams
from shared.types import Handle, int32s

VOCAB = 50
LIMITS = Announce(
    fingerprint="f",
    num_blocks=40,
    block_size=4,
    max_num_seqs=5,
    max_num_batched_tokens=16,
    max_model_len=30,
    vocab_size=VOCAB,
)


def make_batch() -> PersistentBatch:
    return PersistentBatch(LIMITS, frozenset({2}), torch.device("cpu"))


def make_plan(**columns: Any) -> Plan:
    names = ("block_slots", "block_counts", "block_ids", "row_slots", "row_starts", "row_tokens")
    filled: dict[str, Any] = {name: int32s(columns.pop(name, ())) for name in names}
    retired = int32s(columns.pop("retired", ()))
    return Plan(step=1, retired=retired, entering=columns.pop("entering", []), **filled, **columns)


def rows_of(batch: PersistentBatch, plan: Plan) -> Rows:
    batch.apply(plan)
    return batch.rows(plan)


def entering(slot: int, tokens: list[int], **changes: Any) -> EnteringSequence:
    params = SamplingParams(seed=5 + slot, max_tokens=9, temperature=0.5 + slot)
    sequence = EnteringSequence(slot, Handle(100 + slot), f"d{slot % 2}", 1, params, int32s(tokens))
    return replace(sequence, **changes)


@dataclass
class Model:
    """One sequence, as it should be."""

    tokens: list[int]
    seed: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    finished: bool = False


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_those_of_the_sequences(data: st.DataObject) -> None:
    batch, model = make_batch(), dict[int, Model]()
    for _ in range(data.draw(st.integers(1, 12))):
        retired = data.draw(st.sets(st.sampled_from(sorted(model)))) if model else set()
        for slot in retired:
            del model[slot]
        free = [slot for slot in range(LIMITS.max_num_seqs) if slot not in model]
        arriving = []
        for slot in data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []:
            tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
            arriving.append(entering(slot, tokens))
            model[slot] = Model(list(tokens), 5 + slot)
        budget, grants, rows = LIMITS.max_num_batched_tokens, [], []
        for slot in data.draw(st.permutations(sorted(model))):
            one = model[slot]
            count = min(budget, data.draw(st.integers(0, len(one.tokens) - one.computed)))
            if count == 0 or len(one.tokens) >= LIMITS.max_model_len:
                continue
            budget -= count
            rows.append((slot, one.computed, count))
            needed = -(-(one.computed + count) // LIMITS.block_size)
            while len(one.blocks) < needed:  # one by one: a slot may stand there twice
                block = data.draw(st.integers(0, LIMITS.num_blocks - 1))
                one.blocks.append(block)
                grants.append((slot, block))
        made = rows_of(
            batch,
            make_plan(
                retired=sorted(retired),
                entering=arriving,
                block_slots=[slot for slot, _ in grants],
                block_counts=[1] * len(grants),
                block_ids=[block for _, block in grants],
                row_slots=[slot for slot, _, _ in rows],
                row_starts=[start for _, start, _ in rows],
                row_tokens=[count for _, _, count in rows],
            ),
        )
        rows = [row for row in rows if not model[row[0]].finished]
        assert list(zip(made.slots, made.starts, made.counts, strict=True)) == rows
        sampled = []
        for slot, start, count in rows:
            one = model[slot]
            assert batch.tokens[slot, : len(one.tokens)].tolist() == one.tokens
            assert batch.blocks[slot, : len(one.blocks)].tolist() == one.blocks
            assert batch.sampling.seed[slot] == one.seed
            one.computed = start + count
            if one.computed == len(one.tokens):
                sampled.append((slot, len(one.tokens)))
        assert list(zip(made.sampling_slots, made.positions, strict=True)) == sampled
        for slot, position in sampled:  # what the runner does with a sample
            token = data.draw(st.integers(0, VOCAB - 1))
            batch.tokens[slot, position] = token
            model[slot].tokens.append(token)
            if data.draw(st.booleans()):
                batch.finish(slot)
                model[slot].finished = True
        assert batch.num_running == sum(not one.finished for one in model.values())


NO_TOKENS = SamplingParams(seed=0, max_tokens=0)
FITTING: dict[str, Any] = {
    "entering": [entering(1, [3, 4, 5, 6, 7])],
    "block_slots": [1],
    "block_counts": [2],
    "block_ids": [39, 0],
    "row_slots": [1],
    "row_starts": [0],
    "row_tokens": [5],
}

MISFITS: dict[str, dict[str, Any]] = {
    "retires a free slot": {"retired": [0]},
    "retires no slot": {"retired": [-1]},
    "retires beyond the slots": {"retired": [5]},
    "enters beyond the slots": {"entering": [entering(1, [3] * 5), entering(5, [3])]},
    "enters before the slots": {"entering": [entering(1, [3] * 5), entering(-1, [3])]},
    "enters a slot twice": {"entering": [entering(1, [3] * 5), entering(1, [3] * 5)]},
    "enters without tokens": {"entering": [entering(1, [3] * 5), entering(2, [])]},
    "enters without a prompt": {"entering": [entering(1, [3] * 5, prompt_tokens=0)]},
    "has more prompt than tokens": {"entering": [entering(1, [3] * 5, prompt_tokens=6)]},
    "enters with a full context": {"entering": [entering(1, [3] * 5), entering(2, [3] * 30)]},
    "enters with more than a context": {
        "entering": [entering(1, [3] * 5), entering(2, [3] * 31, params=NO_TOKENS)]
    },
    "has a token beyond the vocabulary": {"entering": [entering(1, [3, 4, 5, 6, VOCAB])]},
    "has a negative token": {"entering": [entering(1, [3, 4, 5, 6, -1])]},
    "grants a block beyond the cache": {"block_ids": [39, 40]},
    "grants a negative block": {"block_ids": [-1, 0]},
    "grants to a free slot": {"block_slots": [2]},
    "grants a negative count": {"block_slots": [1, 1], "block_counts": [3, -1]},
    "grants more than a context": {"block_counts": [9], "block_ids": [1] * 9},
    "runs a free slot": {"row_slots": [0]},
    "runs no slot": {"row_slots": [-1]},
    "runs beyond the slots": {"row_slots": [5]},
    "runs a slot twice": {"row_slots": [1, 1], "row_starts": [0, 3], "row_tokens": [3, 2]},
    "runs beyond the tokens": {"row_tokens": [6]},
    "runs before the tokens": {"row_starts": [-1]},
    "runs nothing": {"row_tokens": [0]},
    "runs beyond its blocks": {"block_counts": [1], "block_ids": [39]},
}


def test_the_plan_that_the_misfits_are_made_of_fits() -> None:
    rows = rows_of(make_batch(), make_plan(**FITTING))
    assert rows.slots.tolist() == [1]
    assert rows.positions.tolist() == [5]


@pytest.mark.parametrize("name", MISFITS)
def test_a_plan_does_not_fit_if_it(name: str) -> None:
    batch = make_batch()
    with pytest.raises(PlanMisfit):
        rows_of(batch, make_plan(**FITTING | MISFITS[name]))
    batch.reset()
    rows_of(batch, make_plan(**FITTING))


def test_a_plan_does_not_fit_if_it_is_over_the_token_budget() -> None:
    blocks = {"block_slots": [1], "block_counts": [5], "block_ids": range(5)}
    long = FITTING | blocks | {"entering": [entering(1, [3] * 17)]}
    rows_of(make_batch(), make_plan(**long | {"row_tokens": [16]}))
    with pytest.raises(PlanMisfit):
        rows_of(make_batch(), make_plan(**long | {"row_tokens": [17]}))


def test_rows_of_a_finished_slot_are_not_run_however_far_they_run_ahead() -> None:
    batch = make_batch()
    rows_of(batch, make_plan(**FITTING))
    batch.finish(1)
    for start in (5, 6, 7):
        rows = rows_of(batch, make_plan(row_slots=[1], row_starts=[start], row_tokens=[1]))
        assert len(rows.slots) == len(rows.positions) == 0
    rows_of(batch, make_plan(**FITTING | {"retired": [1]}))


def test_a_prompt_may_fill_the_context_if_nothing_is_generated() -> None:
    full = entering(1, [3] * 30, prompt_tokens=30, params=NO_TOKENS)
    blocks = {"block_counts": [8], "block_ids": range(8)}
    rows = rows_of(
        make_batch(),
        make_plan(
            **FITTING | blocks | {"entering": [full], "row_starts": [16], "row_tokens": [14]}
        ),
    )
    assert rows.positions.tolist() == [30]

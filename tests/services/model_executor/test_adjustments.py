"""Logits before a token is chosen: against vLLM's rules, written out, whatever else runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from services.model_executor.adjustments import Adjustments
from services.model_executor.finish import StopRules
from services.model_executor.runner import ModelRunner
from shared.messages import NEWEST, Plan
from shared.model import ModelInfo
from shared.sampling import LogitBias, SamplingParams
from shared.types import Handle, int32s
from tests.services.model_executor.plan_maker import PlanMaker, Running
from tests.services.model_executor.test_architectures import run_with_preemption
from tests.services.model_executor.tiny_models import COMMON, EPOCH, VOCAB, make_runner, save

EOS = frozenset({2})
SLOTS = 4
TINY = 9  # tokens of a vocabulary in which everything repeats


def adjusted(
    logits: list[float], tokens: list[int], prompt: int, params: SamplingParams
) -> tuple[list[float], set[int], set[int]]:
    """vLLM's order: bias, repetition, frequency, presence; which are avoided, which forbidden."""
    values = list(logits)
    for bias in params.logit_bias:
        values[bias.token_id] += bias.value
    for token in set(tokens):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, count in Counter(tokens[prompt:]).items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    avoided = set(EOS) if len(tokens) < prompt + params.min_tokens else set()
    for word in params.bad_word_ids:
        begun = list(word[:-1])
        if not begun or tokens[-len(begun) :] == begun:
            avoided.add(word[-1])
    allowed = set(params.allowed_token_ids) or set(range(len(values)))
    return values, avoided, set(range(len(values))) - allowed


ids = st.integers(0, TINY - 1)
strengths = st.sampled_from([0.0, 0.0, 0.5, 2.0, -1.5])
wishes = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.7]),
        "frequency_penalty": strengths,
        "presence_penalty": strengths,
        "min_tokens": st.sampled_from([0, 3]),
        "logit_bias": st.dictionaries(ids, st.floats(-9, 9), max_size=3).map(
            lambda bias: [LogitBias(token, value) for token, value in bias.items()]
        ),
        "allowed_token_ids": st.sets(ids, max_size=4).map(int32s),
        "bad_word_ids": st.lists(st.lists(ids, min_size=1, max_size=3).map(int32s), max_size=3),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_rows_are_adjusted_as_the_rules_say(data: st.DataObject) -> None:
    adjustments = Adjustments(SLOTS, TINY, torch.device("cpu"))
    table = torch.full((SLOTS, 20), 77, dtype=torch.int32)  # what lies beyond the end: anything
    table[:] = torch.randint(0, TINY, table.shape)
    expected, slots, positions = [], [], []
    logits = torch.randn(SLOTS, TINY)
    for line, slot in enumerate(data.draw(st.permutations(range(SLOTS)))):
        wanted: dict[str, Any] = data.draw(wishes | st.just({}))
        params = SamplingParams(seed=0, max_tokens=15, **wanted)
        tokens = data.draw(st.lists(ids, min_size=1, max_size=12))
        prompt = data.draw(st.integers(1, len(tokens)))
        adjustments.enter(slot, params, prompt, StopRules.of(params, prompt, EOS, 20))
        table[slot, : len(tokens)] = torch.tensor(tokens)
        slots.append(slot)
        positions.append(len(tokens))
        expected.append(adjusted(logits[line].tolist(), tokens, prompt, params))
    columns = (torch.tensor(slots).numpy(), torch.tensor(positions).numpy())
    made = adjustments.apply(logits, table, *columns)
    for line, (values, avoided, forbidden) in enumerate(expected):
        for token, value in enumerate(values):
            if token in forbidden:
                assert made[line, token] == float("-inf")
            elif token in avoided:
                assert -1e20 < made[line, token] < -1e10
            else:
                assert made[line, token].item() == pytest.approx(value, abs=1e-5)


def test_rows_without_wishes_are_left_alone() -> None:
    adjustments = Adjustments(2, TINY, torch.device("cpu"))
    wishful = SamplingParams(seed=0, max_tokens=5, presence_penalty=1.0)
    for slot, params in enumerate((wishful, SamplingParams(seed=0, max_tokens=5))):
        adjustments.enter(slot, params, 1, StopRules.of(params, 1, EOS, 20))
    logits, table = torch.randn(2, TINY).bfloat16(), torch.ones(2, 20, dtype=torch.int32)
    slots, positions = torch.tensor([0, 1]).numpy(), torch.tensor([3, 3]).numpy()
    assert adjustments.apply(logits[1:], table, slots[1:], positions[1:]).dtype == torch.bfloat16
    made = adjustments.apply(logits, table, slots, positions)
    assert made.dtype == torch.float32
    assert torch.equal(made[1], logits[1].float())
    assert made[0, 1] == logits[0, 1].float() - 1.0


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    adjustments = Adjustments(1, TINY, torch.device("cpu"))
    params = SamplingParams(
        seed=0,
        max_tokens=5,
        logit_bias=[LogitBias(TINY, 5.0), LogitBias(-1, 5.0)],
        bad_word_ids=[int32s([TINY]), int32s([-1, 3]), int32s([])],
        allowed_token_ids=int32s([3, TINY, -1]),
    )
    adjustments.enter(0, params, 1, StopRules.of(params, 1, EOS, 20))
    logits, table = torch.randn(1, TINY), torch.zeros(1, 20, dtype=torch.int32)
    made = adjustments.apply(
        logits.clone(), table, torch.tensor([0]).numpy(), torch.tensor([1]).numpy()
    )
    assert made[0, 3] == logits[0, 3]
    assert made.isinf().sum() == TINY - 1


# --- in the runner -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return save(LlamaConfig(**COMMON), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(info: ModelInfo) -> ModelRunner:
    return make_runner(info)


def sequence(handle: int, prompt: list[int], **params: Any) -> Running:
    given = {"seed": handle, "temperature": 0.0, "max_tokens": 20} | params
    return Running(Handle(handle), len(prompt), SamplingParams(**given), list(prompt))


def run(runner: ModelRunner, *sequences: Running) -> None:
    runner.reset()
    run_with_preemption(runner, list(sequences))


def crowd() -> list[Running]:
    return [
        sequence(1, [5, 6, 7] * 3, repetition_penalty=1.4, frequency_penalty=0.8),
        sequence(2, [3, 1, 4, 1], temperature=1.2, presence_penalty=1.1, frequency_penalty=-0.4),
        sequence(3, [9] * 11, temperature=0.8, top_p=0.9, repetition_penalty=1.2),
        sequence(4, [8, 8], bad_word_ids=[int32s([8, n]) for n in range(0, VOCAB, 2)]),
    ]


def test_penalized_text_is_the_same_alone_in_a_crowd_and_after_preemption(
    runner: ModelRunner,
) -> None:
    together, alone = crowd(), crowd()
    run(runner, *together)
    for one in alone:
        run(runner, one)
    assert [one.outputs for one in together] == [one.outputs for one in alone]
    plain = [
        replace(one, params=sequence(1, [1]).params, tokens=one.tokens[: one.prompt_tokens])
        for one in crowd()
    ]
    run(runner, *plain)
    assert all(a.outputs != b.outputs for a, b in zip(plain, together, strict=True))


def test_penalties_hold_ahead_of_results_and_under_a_lease(runner: ModelRunner) -> None:
    """The tokens of later iterations come from the device alone."""
    usual, leased = crowd()[0], crowd()[0]
    run(runner, usual)
    runner.reset()
    maker = PlanMaker(runner.announce())
    maker.enter(leased)
    while len(leased.tokens) == leased.prompt_tokens:
        maker.take(runner.execute(maker.plan(), EPOCH))
    rows = (int32s([leased.slot]), int32s([NEWEST]), int32s([1]))
    blocks = [80 + i for i in range(8)]
    grant = (int32s([leased.slot]), int32s([len(blocks)]), int32s(blocks))
    plan = Plan(maker.step + 1, int32s(), [], *grant, *rows, lease=18)
    tokens: list[int] = []
    for iteration in range(19):
        tokens += runner.execute(plan, EPOCH, iteration).scheduler.token_ids
    assert leased.outputs + tokens == usual.outputs


def test_only_allowed_tokens_come_and_words_are_never_completed(runner: ModelRunner) -> None:
    allowed = int32s([3, 50, 70])
    few = sequence(1, [5, 6], allowed_token_ids=allowed)
    drawn = sequence(2, [5, 6], allowed_token_ids=allowed, temperature=3.0)
    kept_apart = sequence(
        3, [5, 3], allowed_token_ids=allowed, temperature=30.0, bad_word_ids=[int32s([3, 50])]
    )
    run(runner, few, drawn, kept_apart)
    for one in (few, drawn, kept_apart):
        assert set(one.outputs) <= set(allowed)
    assert set(drawn.outputs) == set(allowed)
    pairs = list(pairwise(kept_apart.tokens))
    assert (3, 50) not in pairs
    assert (50, 3) in pairs


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0}, {"temperature": 1e-4, "top_k": 3}, {"temperature": 1, "top_p": 0.5}],
)
def test_where_all_is_avoided_an_allowed_token_comes(
    runner: ModelRunner, sampling: dict[str, Any]
) -> None:
    allowed = int32s([3, 50])
    words = [int32s([3]), int32s([50])]
    one = sequence(1, [5], allowed_token_ids=allowed, bad_word_ids=words, **sampling)
    run(runner, one)
    assert len(one.outputs) == 20
    assert set(one.outputs) <= set(allowed)


def test_bias_decides(runner: ModelRunner) -> None:
    forced = sequence(1, [5], logit_bias=[LogitBias(33, 100.0)])
    banned = sequence(2, [5])
    run(runner, forced, banned)
    assert set(forced.outputs) == {33}
    without = sequence(2, [5], logit_bias=[LogitBias(t, -100.0) for t in banned.outputs])
    run(runner, without)
    assert not set(without.outputs) & set(banned.outputs)


def test_end_ids_are_held_back_until_min_tokens(info: ModelInfo, tmp_path: Path) -> None:
    ending = make_runner(replace(info, eos_token_ids=frozenset({33})))
    one = sequence(1, [5], logit_bias=[LogitBias(33, 100.0)], min_tokens=4)
    run(ending, one)
    assert len(one.outputs) == 5
    assert one.outputs.index(33) == 4

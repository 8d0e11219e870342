"""Plans that make no sense, on a real model: they run or do not fit, and leave nothing behind."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from scripts.frames import Forge
from services.model_executor.batch import PlanMisfit
from services.model_executor.runner import ModelRunner
from shared.codec import BadFrame, decode
from shared.messages import Plan
from shared.types import Incarnation, ServiceName
from tests.services.model_executor.plan_maker import PlanMaker
from tests.services.model_executor.tiny_models import COMMON, VOCAB, greedy, make_runner, save

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SLOTS = 4


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """With blocks for a few sequences, and a budget that is soon too small."""
    info = save(LlamaConfig(**COMMON), tmp_path_factory.mktemp("llama"))
    return make_runner(info, num_gpu_blocks_override=24, max_num_batched_tokens=32)


def answer(runner: ModelRunner) -> list[int]:
    runner.reset()
    maker, one = PlanMaker(runner.announce()), greedy(1, PROMPT)
    maker.enter(one)
    while maker.running:
        maker.take(runner.execute(maker.plan(), Incarnation(7)))
    return one.outputs


def test_senseless_plans_run_or_do_not_fit(runner: ModelRunner) -> None:
    expected = answer(runner)
    ran = misfits = 0

    def taken() -> list[int]:
        return [slot for slot in range(SLOTS) if runner._batch._taken[slot]]

    pools = {
        "slot": lambda: [slot for slot in range(SLOTS) if slot not in taken()],
        "taken": taken,
        "max_tokens": lambda: [2, 40],
    }

    @settings(max_examples=150)
    @given(st.lists(st.integers(0, 2**32), min_size=1, max_size=12))
    def attacked(seeds: list[int]) -> None:
        nonlocal ran, misfits
        runner.reset()
        for seed in seeds:
            forge = Forge(Random(seed), ServiceName.MODEL_EXECUTOR, pools=pools, vocabulary=VOCAB)
            try:
                plan, _, _ = decode(forge.frame(Plan))
            except BadFrame:
                continue
            if not isinstance(plan, Plan):
                continue
            try:
                for iteration in range(min(plan.lease, 2) + 1):
                    runner.execute(plan, Incarnation(7), iteration)
                    ran += 1
            except PlanMisfit:
                misfits += 1
                runner.reset()

    attacked()
    assert ran > 50 and misfits > 50  # else nothing was shown
    assert answer(runner) == expected

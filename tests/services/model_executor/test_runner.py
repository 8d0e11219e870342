"""Running plans: what is sampled, when it ends, and who hears of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from services.model_executor.batch import PlanMisfit
from services.model_executor.results import StepOutput
from services.model_executor.runner import ModelRunner
from shared.messages import Plan
from shared.model import ModelInfo
from shared.sampling import SamplingParams
from shared.service import StartError
from shared.types import FinishReason, Handle, int32s
from tests.services.model_executor.plan_maker import PlanMaker, Running
from tests.services.model_executor.tiny_models import (
    COMMON,
    EPOCH,
    MAX_MODEL_LEN,
    VOCAB,
    greedy,
    make_runner,
    save,
)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return save(LlamaConfig(**COMMON), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(info: ModelInfo) -> ModelRunner:
    return make_runner(info)


def run(runner: ModelRunner, *sequences: Running) -> list[StepOutput]:
    """From an empty batch to the end."""
    runner.reset()
    maker = PlanMaker(runner.announce())
    for sequence in sequences:
        maker.enter(sequence)
    outputs = []
    while maker.running:
        outputs.append(runner.execute(maker.plan(), EPOCH))
        maker.take(outputs[-1])
    return outputs


def sequence(prompt: list[int], **params: Any) -> Running:
    given = {"seed": 0, "temperature": 0.0, "max_tokens": 20} | params
    return Running(Handle(1), len(prompt), SamplingParams(**given), list(prompt))


def test_what_it_can_hold_is_announced(runner: ModelRunner) -> None:
    limits = runner.announce()
    assert (limits.num_blocks, limits.block_size, limits.max_num_seqs) == (90, 4, 4)
    assert (limits.max_num_batched_tokens, limits.max_model_len) == (7, MAX_MODEL_LEN)
    assert runner.num_running == 0


def test_stop_token_ids_end_a_sequence_and_min_tokens_holds_them_back(runner: ModelRunner) -> None:
    free = sequence([5, 6])
    run(runner, free)
    assert free.finish is FinishReason.LENGTH
    stop = int32s([free.outputs[3]])
    first = free.outputs.index(stop[0])
    stopped = sequence([5, 6], stop_token_ids=stop)
    run(runner, stopped)
    assert stopped.outputs == free.outputs[: first + 1]
    assert stopped.finish is FinishReason.STOP
    held = sequence([5, 6], stop_token_ids=stop, min_tokens=first + 5)
    run(runner, held)
    assert len(held.outputs) > first + 5
    assert held.outputs[:first] == free.outputs[:first]
    assert stop[0] not in held.outputs[: first + 5]


def test_end_of_sequence_ids_are_the_models(info: ModelInfo, runner: ModelRunner) -> None:
    free = sequence([5, 6])
    run(runner, free)
    ids = frozenset(free.outputs[2:3])
    runner = make_runner(replace(info, eos_token_ids=ids))
    ended, ignoring = sequence([5, 6]), sequence([5, 6], ignore_eos=True)
    run(runner, ended)
    run(runner, ignoring)
    assert ended.finish is FinishReason.STOP
    assert ended.outputs[-1] in ids
    assert ignoring.outputs == free.outputs


def test_the_context_is_used_to_its_last_token(runner: ModelRunner) -> None:
    full = sequence([5] * (MAX_MODEL_LEN - 3), max_tokens=None)
    run(runner, full)
    assert len(full.tokens) == MAX_MODEL_LEN
    assert full.finish is FinishReason.LENGTH


def test_each_detokenizer_hears_of_its_own_rows(runner: ModelRunner) -> None:
    sequences = [greedy(handle, [handle, 3], 4) for handle in (1, 2, 3)]
    sequences[1].detokenizer = "d1"
    for output in run(runner, *sequences):
        whole = output.scheduler
        parts = output.detokenizers
        assert whole.epoch == EPOCH
        rows = list(
            zip(whole.handles, whole.positions, whole.token_ids, whole.finishes, strict=True)
        )
        for name, part in parts.items():
            mine = [row for row in rows if (row[0] == 2) is (name == "d1")]
            assert (part.step, part.epoch) == (whole.step, whole.epoch)
            assert mine == list(
                zip(part.handles, part.positions, part.token_ids, part.finishes, strict=True)
            )
        assert sum(len(part.handles) for part in parts.values()) == len(rows)


def test_a_plan_that_samples_nothing_is_answered(runner: ModelRunner) -> None:
    maker = PlanMaker(runner.announce())
    maker.enter(greedy(1, [3] * 9))
    output = runner.execute(maker.plan(), EPOCH)
    assert output.scheduler.step == 1
    assert not output.scheduler.handles
    assert output.detokenizers == {}
    assert (output.prefill_tokens, output.decode_tokens) == (7, 0)
    none = int32s()
    nothing = Plan(2, none, [], none, none, none, none, none, none)
    assert not runner.execute(nothing, EPOCH).scheduler.handles


def test_plans_may_run_ahead_of_their_results(runner: ModelRunner) -> None:
    """Every plan is made before the results of the two before it are known."""
    usual = greedy(1, [3, 8, 2], 6)
    run(runner, usual)
    runner.reset()
    ahead = greedy(1, [3, 8, 2], 6)
    maker = PlanMaker(runner.announce())
    maker.enter(ahead)
    plans = []
    for _ in range(9):  # three more than it will take
        plans.append(maker.plan())
        ahead.tokens.append(-1)  # not known
    tokens: list[int] = []
    for plan in plans:
        result = runner.execute(plan, EPOCH).scheduler
        tokens += result.token_ids
    assert tokens == usual.outputs
    assert runner.num_running == 0


def test_stale_memory_is_never_read(info: ModelInfo, runner: ModelRunner) -> None:
    prompts = [[5], [3] * 11, [9] * 30]
    clean = [greedy(i + 1, prompt) for i, prompt in enumerate(prompts)]
    run(runner, *clean)
    for cache in runner._caches:
        for side in cache:
            side[:, :-1] = math.nan
    poisoned = [greedy(i + 1, prompt) for i, prompt in enumerate(prompts)]
    run(runner, *poisoned)
    assert [s.outputs for s in poisoned] == [s.outputs for s in clean]


def test_logits_that_are_no_numbers_end_their_sequence_alone(info: ModelInfo) -> None:
    runner = make_runner(info)
    healthy = greedy(1, [3, 4])
    run(runner, healthy)
    unused = next(token for token in range(VOCAB) if token not in healthy.tokens)
    embedding = next(iter(runner._model.parameters()))
    embedding[unused] = math.nan
    again, broken = greedy(1, [3, 4]), greedy(2, [5, unused, 6])
    run(runner, broken, again)
    assert broken.finish is FinishReason.ERROR
    assert len(broken.outputs) == 1
    assert 0 <= broken.outputs[0] < VOCAB
    assert again.outputs == healthy.outputs


def test_after_a_misfit_and_a_reset_it_goes_on(runner: ModelRunner) -> None:
    expected = greedy(1, [3, 4])
    run(runner, expected)
    runner.reset()
    maker = PlanMaker(runner.announce())
    maker.enter(greedy(1, [3, 4]))
    plan = maker.plan()
    runner.execute(plan, EPOCH)
    with pytest.raises(PlanMisfit):
        runner.execute(plan, EPOCH)
    runner.reset()
    assert runner.num_running == 0
    again = greedy(1, [3, 4])
    run(runner, again)
    assert again.outputs == expected.outputs


def test_a_cache_without_a_block_is_refused(info: ModelInfo) -> None:
    with pytest.raises(StartError, match="KV cache"):
        make_runner(info, num_gpu_blocks_override=None, kv_cache_memory_bytes=1)


def test_a_model_of_one_block_and_one_token_at_a_time_runs(info: ModelInfo, tmp_path: Path) -> None:
    runner = make_runner(
        info, num_gpu_blocks_override=5, block_size=1, max_num_batched_tokens=1, max_num_seqs=1
    )
    usual = greedy(1, [3, 4], 3)
    run(make_runner(info), usual)
    narrow = greedy(1, [3, 4], 3)
    run(runner, narrow)
    assert narrow.outputs == usual.outputs

"""The simulated accelerator: its words, what they depend on, and the time that it says it took."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.model_executor.results import Span, StepOutput
from services.model_executor.simulated import SimulatedBackend
from shared.model import ModelInfo, read_model_info
from shared.sampling import SamplingParams
from shared.service import StartError
from shared.settings import Settings
from shared.types import FinishReason, Handle, Incarnation, int32s
from tests.services.model_executor.plan_maker import PlanMaker, Running

EPOCH = Incarnation(7)
PROMPT = [504, 3575, 282]


@pytest.fixture(scope="module")
def info(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """The real model, without its weights."""
    directory = tmp_path_factory.mktemp("weightless")
    for file in model_dir.glob("*.json"):
        (directory / file.name).symlink_to(file)
    return read_model_info(directory, max_model_len=256)


def backend(info: ModelInfo, sim: str = "base=0", **settings: Any) -> SimulatedBackend:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    return SimulatedBackend(Settings(device="simulated", sim=sim, **given), info)


def sequence(handle: int = 1, prompt: list[int] = PROMPT, **params: Any) -> Running:
    given = {"seed": 5, "temperature": 1.0, "max_tokens": 20} | params
    return Running(Handle(handle), len(prompt), SamplingParams(**given), list(prompt))


def run(backend: SimulatedBackend, *sequences: Running) -> list[StepOutput]:
    """From an empty batch to the end."""
    backend.reset()
    maker = PlanMaker(backend.announce())
    for one in sequences:
        maker.enter(one)
    outputs = []
    while maker.running:
        outputs.append(backend.execute(maker.plan(), EPOCH))
        maker.take(outputs[-1])
    return outputs


def outputs(info: ModelInfo, **params: Any) -> list[int]:
    one = sequence(**params)
    run(backend(info), one)
    return one.outputs


def test_every_token_is_a_word_and_none_an_end(info: ModelInfo) -> None:
    ids = outputs(info, max_tokens=200)
    assert len(ids) == 200
    assert not info.eos_token_ids & set(ids)
    tokenizer = Tokenizer.from_file(str(info.path / "tokenizer.json"))
    assert all(re.fullmatch(" [a-z]{2,}", tokenizer.decode([token])) for token in ids)
    assert len(set(ids)) > 150


def test_tokens_follow_from_seed_and_text(info: ModelInfo) -> None:
    ids = outputs(info)
    assert outputs(info) == ids
    assert outputs(info, seed=6) != ids
    assert outputs(info, prompt=[504, 3575, 283]) != ids
    greedy = outputs(info, temperature=0.0)
    assert outputs(info, temperature=0.0, seed=6) == greedy


def test_tokens_are_the_same_in_a_crowd_and_when_recomputed(info: ModelInfo) -> None:
    alone = outputs(info)
    crowd = [sequence(number, PROMPT[: number + 1], seed=number) for number in range(5)]
    among = sequence(9)
    run(backend(info), *crowd, among)
    assert among.outputs == alone
    resumed = Running(Handle(3), len(PROMPT), among.params, [*PROMPT, *alone[:11]])
    run(backend(info), resumed)
    assert resumed.outputs == alone


def test_stop_ids_and_the_length_end_a_sequence(info: ModelInfo) -> None:
    free = outputs(info)
    stopped = sequence(stop_token_ids=int32s([free[4]]))
    run(backend(info), stopped)
    assert stopped.outputs == free[:5]
    assert stopped.finish is FinishReason.STOP
    held = sequence(stop_token_ids=int32s([free[4]]), min_tokens=10)
    run(backend(info), held)
    assert held.outputs == free
    assert held.finish is FinishReason.LENGTH


def test_ends_come_at_the_rate_asked_for(info: ModelInfo) -> None:
    simulated = backend(info, "base=0,end=0.1")
    crowds = [[sequence(n, seed=40 * s + n, max_tokens=99) for n in range(8)] for s in range(5)]
    for crowd in crowds:
        run(simulated, *crowd)
    ended = [one for crowd in crowds for one in crowd if one.finish is FinishReason.STOP]
    assert all(one.outputs[-1] in info.eos_token_ids for one in ended)
    assert 4 < sum(len(one.outputs) for one in ended) / len(ended) < 25
    held, deaf = sequence(min_tokens=90, max_tokens=95), sequence(2, ignore_eos=True)
    run(backend(info, "base=0,end=1"), held, deaf)
    assert (len(held.outputs), held.finish) == (91, FinishReason.STOP)
    assert (len(deaf.outputs), deaf.finish) == (20, FinishReason.LENGTH)


def test_iterations_take_what_they_cost(info: ModelInfo) -> None:
    simulated = backend(info, "base=0.002,prefill=0.0001,decode=0.0005")
    spans = [output.span for output in run(simulated, sequence(1), sequence(2, max_tokens=3))]
    lengths = [span.ended - span.began for span in spans[:4]]
    assert lengths == pytest.approx([0.0026, 0.003, 0.003, 0.0025], abs=1e-6)


def test_plans_in_time_follow_without_a_gap_and_late_ones_begin_when_they_come(
    info: ModelInfo,
) -> None:
    simulated = backend(info, "base=0.001")
    maker = PlanMaker(simulated.announce())
    maker.enter(sequence())

    def span(arrived: float) -> Span:
        output = simulated.execute(maker.plan(), EPOCH, arrived=arrived)
        maker.take(output)
        return output.span

    past = time.monotonic() - 100
    first = span(past)
    second = span(first.began)
    third = span(second.ended + 0.5)
    assert first.began == past
    assert second.began == first.ended
    assert third.began == second.ended + 0.5


def test_a_plan_without_rows_takes_no_time(info: ModelInfo) -> None:
    simulated = backend(info, "base=0.5")
    none = int32s()
    plan = replace(PlanMaker(simulated.announce()).plan(), retired=none)
    span = simulated.execute(plan, EPOCH).span
    assert span.began == span.ended


def test_it_holds_what_it_is_told_to(info: ModelInfo) -> None:
    assert backend(info).announce().num_blocks == 8 * 256 // 16
    assert backend(info, num_gpu_blocks_override=7).announce().num_blocks == 7
    huge = replace(info, max_model_len=1 << 20)
    assert backend(huge, block_size=1).announce().num_blocks == 1 << 18


def test_what_it_cannot_do_without_is_named(info: ModelInfo, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no end id"):
        backend(replace(info, eos_token_ids=frozenset()), "end=0.5")
    with pytest.raises(StartError, match="no words"):
        backend(replace(info, vocab_size=20))
    with pytest.raises(StartError, match="cannot be read"):
        backend(replace(info, path=tmp_path))


def test_it_has_an_opinion_of_every_token(info: ModelInfo) -> None:
    counts: dict[int, int] = {}
    ones, tokens = 0, {}
    one = sequence(max_tokens=9, prompt_logprobs=1, logprobs=3)
    for output in run(backend(info, max_num_batched_tokens=2), one):
        assert output.scheduler.logprobs is None
        told = output.detokenizers["d0"].logprobs if output.detokenizers else None
        if told is None:
            continue
        at, values = 0, np.exp(np.frombuffer(told.values, "<f4"))
        for position, count in zip(told.positions, told.counts, strict=True):
            pairs = told.token_ids[at : at + count]
            counts[position], tokens[position] = count, pairs[0]
            assert pairs[0] == pairs[1]
            assert len(set(pairs[1:])) == count - 1
            expected = [0.5, 0.5, 0.25, 0.125][:count]
            assert values[at : at + count] == pytest.approx(expected)
            at += count
        ones += sum(rank == 1 for rank in told.ranks)
    assert counts == {1: 2, 2: 2} | dict.fromkeys(range(3, 12), 4)
    assert [tokens[position] for position in sorted(tokens)] == one.tokens[1:]
    assert ones == len(counts)


def test_an_opinion_of_a_token_alone(info: ModelInfo) -> None:
    (first, *_) = run(backend(info), sequence(logprobs=0))
    told = first.detokenizers["d0"].logprobs
    assert told is not None
    assert (list(told.counts), list(told.token_ids)) == ([1], list(first.scheduler.token_ids))


def test_a_prompt_has_its_own_direction(info: ModelInfo) -> None:
    def vector(prompt: list[int]) -> Any:
        one = sequence(prompt=prompt, max_tokens=0, embed=True)
        (output,) = run(backend(info), one)
        assert (one.finish, len(one.outputs)) == (FinishReason.LENGTH, 1)
        (embedding,) = output.detokenizers["d0"].embeddings
        return np.frombuffer(embedding.vector, "<f4")

    first = vector(PROMPT)
    assert len(first) == 576
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
    assert (vector(PROMPT) == first).all()
    assert abs(vector([*PROMPT, 5]) @ first) < 0.5


def test_a_prompt_may_fill_the_context_of_the_simulation(info: ModelInfo) -> None:
    full = sequence(prompt=[504] * info.max_model_len, max_tokens=0, prompt_logprobs=0)
    run(backend(info, "base=0,end=1"), full)
    assert (full.finish, len(full.outputs)) == (FinishReason.LENGTH, 1)

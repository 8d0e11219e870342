"""Logprobs and embeddings against transformers' own, with the real scheduler's plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from services.model_executor import reporter
from services.model_executor.results import StepOutput
from services.model_executor.runner import ModelRunner
from services.scheduler.core import SchedulerCore
from services.scheduler.sequence import Sequence as Request
from shared.messages import Logprobs, Route, Submit
from shared.model import ModelInfo
from shared.sampling import LogitBias, SamplingParams
from shared.types import FinishReason, RequestId, int32s
from tests.services.model_executor.test_architectures import FAMILIES, config_of
from tests.services.model_executor.tiny_models import (
    COMMON,
    EPOCH,
    MAX_MODEL_LEN,
    VOCAB,
    make_runner,
    save,
)
from tests.services.scheduler.core_bench import NAME, next_plan

SHARED = [(7 * i + 2) % VOCAB for i in range(33)]
PROMPTS = ([5], [3, 1, 4, 1, 5], SHARED, [*SHARED, 8, 9], [88, 0, 17] * 6)


@dataclass
class Entry:
    """What was said of one token."""

    rank: int
    own: tuple[int, float]
    best: list[tuple[int, float]]


@dataclass
class Told:
    """Of one request."""

    detokenizer: str
    params: SamplingParams
    prompt: list[int]
    request: Request | None = None
    tokens: list[int] = field(default_factory=list)  # sampled
    finish: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)  # by position
    repeated: int = 0
    vector: Any = None


def entries(logprobs: Logprobs) -> list[tuple[int, int, Entry]]:
    values = np.frombuffer(logprobs.values, "<f4")
    pairs = list(zip(logprobs.token_ids, values.tolist(), strict=True))
    said, at = [], 0
    columns = (logprobs.handles, logprobs.positions, logprobs.ranks, logprobs.counts)
    for handle, position, rank, count in zip(*columns, strict=True):
        said.append((handle, position, Entry(rank, pairs[at], pairs[at + 1 : at + count])))
        at += count
    return said


def note(output: StepOutput, by_handle: dict[int, Told]) -> None:
    """What detokenizers learn; of an iteration each only its own."""
    whole = output.scheduler
    assert whole.logprobs is None
    assert whole.embeddings == []
    for name, result in output.detokenizers.items():
        for handle, position, entry in entries(result.logprobs) if result.logprobs else []:
            one = by_handle[handle]
            assert one.detokenizer == name
            one.repeated += position in one.entries
            one.entries[position] = entry
        for embedding in result.embeddings:
            assert by_handle[embedding.handle].detokenizer == name
            by_handle[embedding.handle].vector = np.frombuffer(embedding.vector, "<f4")
        for handle, token, finish in zip(
            result.handles, result.token_ids, result.finishes, strict=True
        ):
            assert by_handle[handle].detokenizer == name
            by_handle[handle].tokens.append(token)
            by_handle[handle].finish = finish


def serve(runner: ModelRunner, requests: Sequence[Told], **options: Any) -> SchedulerCore:
    """Run them to their ends, each submitted two iterations after the one before."""
    runner.reset()
    core = SchedulerCore(100, clock=lambda: 0.0, **options)
    assert core.connect(NAME, runner.announce()) == []
    by_handle: dict[int, Told] = {}
    arriving = list(requests)
    for step in range(1000):
        if arriving and step % 2 == 0:
            one = arriving.pop(0)
            route, name = Route("g", one.detokenizer), RequestId(f"r{step}")
            request = core.submit(Submit(name, int32s(one.prompt), one.params, route))
            assert isinstance(request, Request), request
            core.opened(request)
            one.request = request
            by_handle[request.handle] = one
        plan = next_plan(core)
        if plan is not None:
            output = runner.execute(plan, EPOCH)
            note(output, by_handle)
            core.apply(NAME, output.scheduler)
        elif not arriving:
            return core
    raise AssertionError("it does not end")


def told(prompt: list[int], number: int = 0, **params: Any) -> Told:
    given = {"seed": number, "temperature": 0.0, "max_tokens": 12} | params
    return Told(f"d{number % 2}", SamplingParams(**given), prompt)


def reference(model: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax after each token, and the normalised hidden state of the last one."""
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    state = output.hidden_states[-1][0, -1]
    return output.logits[0].log_softmax(-1), state / state.norm()


def check(one: Told, model: Any) -> None:
    """All that was said of the tokens is what transformers says of them."""
    tokens, params = one.prompt + one.tokens, one.params
    logprobs, _ = reference(model, tokens)
    wanted: dict[int, int] = {}
    if params.prompt_logprobs is not None:
        wanted |= dict.fromkeys(range(1, len(one.prompt)), params.prompt_logprobs)
    if params.logprobs is not None:
        wanted |= dict.fromkeys(range(len(one.prompt), len(tokens)), params.logprobs)
    assert sorted(one.entries) == sorted(wanted)
    for position, entry in one.entries.items():
        row, (token, value) = logprobs[position - 1], entry.own
        assert token == tokens[position]
        assert value == pytest.approx(row[token].item(), abs=1e-3)
        assert (row > row[token] + 1e-4).sum() < entry.rank <= (row > row[token] - 1e-4).sum()
        best = row.topk(wanted[position]).values.tolist()
        assert [value for _, value in entry.best] == pytest.approx(best, abs=1e-3)
        for token, value in entry.best:
            assert value == pytest.approx(row[token].item(), abs=1e-3)


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteConfig", {"logits_scaling": 3.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 24}),  # its trunk lies deeper
}
HEADS = ["llama", "gemma2", "gpt2", "gpt-neox", "deepseek", "gpt-oss", "qwen3-moe", *MORE]


@pytest.mark.parametrize("family", HEADS)
def test_what_is_told_is_what_transformers_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "HEAD_NUMBERS", 3 * VOCAB)  # prompts in parts
    name, changes = (FAMILIES | MORE)[family]
    info = save(config_of(name, **changes), tmp_path)
    runner = make_runner(info, max_num_batched_tokens=25)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    requests = [
        told(prompt, number, prompt_logprobs=number, logprobs=5 - number)
        for number, prompt in enumerate(PROMPTS)
    ]
    embedded = [told(prompt, n, max_tokens=0, embed=True) for n, prompt in enumerate(PROMPTS)]
    serve(runner, [*requests, *embedded])
    for one in requests:
        check(one, model)
    for one in embedded:
        _, state = reference(model, one.prompt)
        assert one.vector == pytest.approx(state.numpy(), abs=1e-4)
        assert (one.finish, len(one.tokens)) == (FinishReason.LENGTH, 1)
        assert one.request is not None
        assert (one.request.num_cached > 0) is (len(one.prompt) > 4), "found what others computed"


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return save(LlamaConfig(**COMMON), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(info: ModelInfo) -> Any:
    return AutoModelForCausalLM.from_pretrained(info.path, dtype=torch.float32)


def crowd() -> list[Told]:
    return [
        told(SHARED, 0, max_tokens=20),  # tells nothing
        told(SHARED, 1, prompt_logprobs=2, max_tokens=20),
        told([*SHARED, 8, 9], 2, logprobs=0, temperature=1.3, max_tokens=20),
        told([3, 1, 4], 3, logprobs=3, prompt_logprobs=0, presence_penalty=1.5, max_tokens=20),
        told([88, 0, 17] * 6, 4, logprobs=1, logit_bias=[LogitBias(3, 50.0)], max_tokens=9),
        told([3, 1], 5, logprobs=4, temperature=0.7, top_k=5, allowed_token_ids=int32s([4, 9])),
    ]


def test_in_a_crowd_that_is_preempted_and_shares_prefixes(info: ModelInfo, model: Any) -> None:
    runner = make_runner(info, num_gpu_blocks_override=24, max_num_batched_tokens=9)
    together = crowd()
    core = serve(runner, together)
    assert core.counters.preemptions > 0
    assert core.fleet.cache_stats.hits > 0
    assert sum(one.repeated for one in together) > 0
    for one in together:
        check(one, model)
    roomy, alone = make_runner(info), crowd()
    for one in alone:
        serve(roomy, [one])
        check(one, model)
    assert [one.tokens for one in together] == [one.tokens for one in alone]


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16, 32, 33, 34])
def test_in_chunks_of_any_size(info: ModelInfo, model: Any, budget: int) -> None:
    """R071: alone and beside decodes; around a block of 4 tokens and a prompt of 33."""
    runner = make_runner(info, max_num_batched_tokens=budget)
    for company in ([], [told([3, 1, 4], 1, max_tokens=40, logprobs=0)]):
        one = told(SHARED, 2, logprobs=2, max_tokens=3)
        serve(runner, [*company, one], prefix_caching=False)
        for each in (*company, one):
            check(each, model)


def test_that_is_told_of_tokens_changes_none_of_them(info: ModelInfo) -> None:
    runner = make_runner(info)
    sampling = {"temperature": 1.1, "frequency_penalty": 0.6}
    silent, asked = told(SHARED, 1, **sampling), told(SHARED, 1, logprobs=3, **sampling)
    serve(runner, [silent])
    serve(runner, [asked])
    assert silent.entries == {}
    assert asked.tokens == silent.tokens


def test_leases_and_run_ahead_tell_of_every_token(info: ModelInfo, model: Any) -> None:
    runner = make_runner(info)
    core = SchedulerCore(9, clock=lambda: 0.0, run_ahead=1, max_lease=4)
    assert core.connect(NAME, runner.announce()) == []
    one = told([3, 1, 4], logprobs=2, max_tokens=30)
    request = core.submit(Submit(RequestId("r"), int32s(one.prompt), one.params, Route("g", "d0")))
    assert isinstance(request, Request)
    core.opened(request)
    while core.num_requests:
        plans = [plan for plan in (next_plan(core), next_plan(core)) if plan is not None]
        outputs = []
        for plan in plans:
            repeats = plan.lease if plan is plans[-1] else 0
            outputs += [runner.execute(plan, EPOCH, n) for n in range(repeats + 1)]
        for output in outputs:
            if output.scheduler.handles:
                note(output, {request.handle: one})
            core.apply(NAME, output.scheduler)
    assert core.counters.leases > 1
    assert len(one.tokens) == 30
    check(one, model)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("length", [1, 40, MAX_MODEL_LEN])
def test_a_prompt_alone_up_to_the_whole_context(
    length: int, max_tokens: int, info: ModelInfo, model: Any
) -> None:
    prompt = [(5 * i + 3) % VOCAB for i in range(length - max_tokens)] or [1]
    one = told(prompt, max_tokens=max_tokens, prompt_logprobs=1, logprobs=1, ignore_eos=False)
    runner = make_runner(info)
    serve(runner, [one])
    assert (one.finish, len(one.tokens)) == (FinishReason.LENGTH, 1)
    assert len(one.entries) == len(prompt)
    if len(prompt) < MAX_MODEL_LEN:  # transformers' model has no place for one more
        check(one, model)
    assert runner.num_running == 0


def test_an_embedding_has_length_one_and_tells_prompts_apart(info: ModelInfo) -> None:
    runner = make_runner(info)
    requests = [told(prompt, max_tokens=0, embed=True) for prompt in (SHARED, [3], SHARED)]
    serve(runner, requests)
    first, other, again = (one.vector for one in requests)
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
    assert again == pytest.approx(first, abs=1e-4)
    assert abs(first @ other) < 0.99


def test_a_model_without_numbers_still_tells_numbers(info: ModelInfo) -> None:
    runner = make_runner(info)
    next(iter(runner._model.parameters()))[7] = float("nan")
    one = told([3, 7, 4], logprobs=2, prompt_logprobs=2)
    serve(runner, [one])
    assert one.finish == FinishReason.ERROR
    values = [entry.own[1] for entry in one.entries.values()]
    assert len(values) == 3
    assert np.isfinite(values).all()

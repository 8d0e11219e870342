"""Answers that follow grammars: every one is of the form asked for, whatever else runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from threading import Event
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

from services.model_executor import grammars
from services.model_executor.backend import Backend
from services.model_executor.runner import ModelRunner
from services.model_executor.simulated import SimulatedBackend
from shared.model import ModelInfo
from shared.sampling import Grammar, GrammarKind, LogitBias, SamplingParams
from shared.settings import Settings
from shared.types import FinishReason, Handle, int32s
from tests.services.model_executor.plan_maker import PlanMaker, Running
from tests.services.model_executor.tiny_models import COMMON, EPOCH, make_runner, save

MERGES = [("{", '"'), ('"', ":"), ("t", "r"), ("tr", "ue"), ("u", "e"), ("}", "}"), ('"', ",")]
EOS = [256 + len(MERGES), 257 + len(MERGES)]
VOCAB = 300  # with rows that are no token's
PROMPT = [3, 1, 4, 1, 5]

SCHEMA, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK


def tiny_tokenizer() -> Tokenizer:
    """Bytes, a few pairs, and two ends."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(first + second for first, second in MERGES)]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = sorted(MERGES, key=lambda pair: (len("".join(pair)), pair))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>"), AddedToken("<stop>")])
    return tokenizer


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    path = tmp_path_factory.mktemp("bytes")
    config = LlamaConfig(**(COMMON | {"vocab_size": VOCAB, "max_position_embeddings": 256}))
    made = save(config, path)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return replace(made, vocab_size=VOCAB, max_model_len=256, eos_token_ids=frozenset(EOS))


@pytest.fixture(scope="module")
def runner(info: ModelInfo) -> ModelRunner:
    return make_runner(
        info, max_num_seqs=16, max_num_batched_tokens=64, num_gpu_blocks_override=1001
    )


def sequence(handle: int, grammar: Grammar | None = None, **params: Any) -> Running:
    given = {"seed": handle, "temperature": 1.0, "max_tokens": 120, "grammar": grammar}
    return Running(Handle(handle), len(PROMPT), SamplingParams(**(given | params)), list(PROMPT))


def run(
    backend: Backend, sequences: Iterable[Running], interrupt: int | None = None, jump: int = 8
) -> int:
    """From an empty batch to the end, in so many iterations.

    interrupt: at this step all leave the batch, and enter again.
    """
    backend.reset()
    maker = PlanMaker(backend.announce(), jump)
    waiting = list(sequences)
    while waiting or maker.running:
        if maker.step == interrupt:
            paused = list(maker.running.values())
            for one in paused:
                maker.retire(one)
            maker.take(backend.execute(maker.plan(), EPOCH))
            waiting = paused + waiting
        while waiting and len(maker.running) < maker.limits.max_num_seqs:
            maker.enter(waiting.pop(0))
        maker.take(backend.execute(maker.plan(), EPOCH))
    return maker.step


def text_of(one: Running) -> str:
    """Of an answer that ended by itself: the end is no text."""
    assert one.finish is FinishReason.STOP and one.outputs[-1] in EOS, one
    text: str = tiny_tokenizer().decode(one.outputs[:-1])
    return text


def random_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["null", "boolean", "integer", "string", "word", "enum", "const", "pattern"]
    if depth:
        kinds += ["array", "object", "object", "either"]
    match random.choice(kinds):
        case "integer":
            least = random.randint(-20, 900)
            return {"type": "integer", "minimum": least, "maximum": least + random.randint(0, 500)}
        case "string":
            return {"type": "string", "maxLength": random.randint(0, 8)}
        case "word":
            return {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[a-zé]+$"}
        case "enum":
            return {"enum": random.sample(["a", "ab", 'q"\n', "ü", 1, 2.5, None, True], 3)}
        case "const":
            return {"const": random.choice(["x", 7, False, [1, "two"], {"k": None}])}
        case "pattern":
            return {"type": "string", "pattern": r"^\d{4}-(0[1-9]|1[0-2])$"}
        case "array":
            least = random.randint(0, 2)
            items = random_schema(random, depth - 1)
            most = least + random.randint(0, 2)
            return {"type": "array", "items": items, "minItems": least, "maxItems": most}
        case "object":
            names = random.sample(["a", "b c", 'd"', "é", "true"], random.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(random, depth - 1) for name in names},
                "required": [name for name in names if random.random() < 0.7],
                "additionalProperties": False,
            }
        case "either":
            return {"anyOf": [random_schema(random, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def test_every_answer_to_a_schema_is_valid(runner: ModelRunner) -> None:
    random = Random(5)
    schemas = [random_schema(random) for _ in range(200)]
    # Without a bound on the space between tokens, a random model writes little else.
    compact = {"x-guidance": {"whitespace_flexible": False}}
    sequences = [
        sequence(number, Grammar(SCHEMA, json.dumps(schema | compact)))
        for number, schema in enumerate(schemas)
    ]
    run(runner, sequences)
    whole = [one for one in sequences if one.finish is not FinishReason.LENGTH]
    assert len(whole) > 180
    for schema, one in zip(schemas, sequences, strict=True):
        if one.finish is not FinishReason.LENGTH:
            jsonschema.validate(json.loads(text_of(one)), schema)


GRAMMARS = [
    Grammar(REGEX, r"\d{3}-\d{4}"),
    Grammar(REGEX, "(yes|no|maybe)"),
    Grammar(LARK, 'start: "(" start ")" | "x"'),
    Grammar(SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    Grammar(SCHEMA, '{"type": "array", "items": {"enum": ["ä", "b"]}, "maxItems": 9}'),
]


def crowd() -> list[Running]:
    """Sequences with and without a grammar."""
    kinds = [*GRAMMARS, None]
    return [sequence(number, kinds[number % len(kinds)], max_tokens=40) for number in range(24)]


def test_each_follows_its_own_grammar_and_ends_by_its_own_rule(runner: ModelRunner) -> None:
    together, interrupted, alone = crowd(), crowd(), crowd()
    run(runner, together)
    run(runner, interrupted, interrupt=7)
    for one in alone:
        run(runner, [one])
    assert [one.outputs for one in together] == [one.outputs for one in alone]
    assert [one.outputs for one in interrupted] == [one.outputs for one in alone]
    assert [one.finish for one in interrupted] == [one.finish for one in alone]
    for one in together:
        if one.params.grammar == GRAMMARS[0]:
            assert re.fullmatch("[0-9]{3}-[0-9]{4}", text_of(one))
        if one.params.grammar == GRAMMARS[1]:
            assert text_of(one) in ("yes", "no", "maybe")


def test_the_end_comes_when_it_must_and_not_before(runner: ModelRunner) -> None:
    """With a bias for an end, the shortest answer; with one against them, the only one."""
    eager = [LogitBias(EOS[0], 100.0)]
    never = [LogitBias(token, -100.0) for token in EOS]
    short = sequence(1, Grammar(REGEX, "[a-z]{3,9}"), logit_bias=eager)
    long = sequence(2, Grammar(REGEX, "[a-z]{3,9}"), logit_bias=never)
    run(runner, [short, long])
    assert len(text_of(short)) == 3 and short.outputs[-1] == EOS[0]
    assert len(text_of(long)) == 9


KEYS = ["identification_number", "remarks_of_the_customer", "is_confirmed"]
FORM = {
    "type": "object",
    "properties": {key: {"type": "boolean"} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LONG_KEYS = Grammar(SCHEMA, json.dumps(FORM))


def form(handle: int, **params: Any) -> Running:
    return sequence(handle, LONG_KEYS, **params)


@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 1.5}, {"temperature": 0.0}], ids=str)
def test_what_is_forced_takes_no_iteration_of_its_own(
    runner: ModelRunner, params: dict[str, Any]
) -> None:
    jumping, walking = form(1, **params), form(1, **params)
    few = run(runner, [jumping])
    assert few < len(jumping.outputs) / 3
    # The same tokens, though: what is forced is the tokenizer's own choice in both.
    assert run(runner, [walking], jump=0) == len(walking.outputs)
    assert walking.outputs == jumping.outputs
    assert list(json.loads(text_of(jumping))) == KEYS


@pytest.mark.parametrize("step", range(2, 14))
def test_a_jump_may_be_interrupted(runner: ModelRunner, step: int) -> None:
    alone, interrupted = form(1), form(1)
    run(runner, [alone])
    run(runner, [interrupted], interrupt=step, jump=3)
    assert interrupted.outputs == alone.outputs


def test_jumps_share_what_the_token_budget_leaves(info: ModelInfo) -> None:
    runner = make_runner(
        info, max_num_seqs=5, max_num_batched_tokens=7, num_gpu_blocks_override=1001
    )
    together, alone = [form(n) for n in range(5)], [form(n) for n in range(5)]
    run(runner, together)
    for one in alone:
        run(runner, [one])
    assert [one.outputs for one in together] == [one.outputs for one in alone]


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 30])
def test_a_jump_ends_where_the_answer_may_have_no_more_tokens(
    runner: ModelRunner, max_tokens: int
) -> None:
    cut, whole = form(1, max_tokens=max_tokens), form(2, seed=1)
    run(runner, [cut, whole])
    assert cut.outputs == whole.outputs[:max_tokens]
    assert cut.finish is FinishReason.LENGTH


def test_a_jump_ends_before_a_stop_token(runner: ModelRunner) -> None:
    whole, stopped = form(1), form(2, seed=1, stop_token_ids=int32s([tiny_id("_")]))
    run(runner, [whole, stopped])
    assert stopped.outputs == whole.outputs[: whole.outputs.index(tiny_id("_")) + 1]
    assert stopped.finish is FinishReason.STOP


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"logit_bias": [LogitBias(EOS[0], 1.0)]},
        {"allowed_token_ids": int32s(range(VOCAB))},
        {"bad_word_ids": [int32s([7, 7, 7])]},
    ],
    ids=str,
)
def test_nothing_is_forced_where_each_token_counts(
    runner: ModelRunner, params: dict[str, Any]
) -> None:
    one = form(1, **params)
    assert run(runner, [one]) == len(one.outputs)
    assert list(json.loads(text_of(one))) == KEYS


def test_a_grammar_goes_on_under_a_lease(runner: ModelRunner) -> None:
    def through(lease: int) -> list[int]:
        runner.reset()
        one, tokens = sequence(1, GRAMMARS[2], max_tokens=12), []
        maker = PlanMaker(runner.announce())
        maker.enter(one)
        maker.take(runner.execute(maker.plan(), EPOCH))
        while not one.finish:
            plan = maker.plan()
            for iteration in range(lease + 1):
                result = runner.execute(plan, EPOCH, iteration).scheduler
                if result.token_ids and not one.finish:
                    maker.take_result(result)
                    one.computed = len(one.tokens) - 1
        tokens += one.outputs
        return tokens

    assert through(lease=2) == through(lease=0)


def test_what_cannot_go_on_ends_with_an_error_alone(runner: ModelRunner) -> None:
    broken = sequence(1, Grammar(REGEX, "("))
    contradicted = sequence(2, Grammar(REGEX, "a+"), allowed_token_ids=int32s([tiny_id("b")]))
    free, followed = sequence(3, max_tokens=8, ignore_eos=True), sequence(4, GRAMMARS[0])
    run(runner, [broken, contradicted, free, followed])
    assert (broken.finish, contradicted.finish) == (FinishReason.ERROR, FinishReason.ERROR)
    assert len(broken.outputs) == len(contradicted.outputs) == 1
    undisturbed = sequence(3, max_tokens=8, ignore_eos=True)
    run(runner, [undisturbed])
    assert (free.outputs, free.finish) == (undisturbed.outputs, FinishReason.LENGTH)
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", text_of(followed))


def test_a_mask_that_never_comes_ends_its_sequence(
    info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(grammars.Grammars, "_build", lambda *_: Event().wait(1))
    late, free = sequence(1, GRAMMARS[0]), sequence(2, max_tokens=4, ignore_eos=True)
    run(make_runner(info), [late, free])
    assert (late.finish, free.finish) == (FinishReason.ERROR, FinishReason.LENGTH)


def test_grammars_used_least_recently_are_forgotten(
    info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_COMPILED", 2)
    runner = make_runner(info)
    run(runner, [sequence(n, Grammar(REGEX, letter * 2)) for n, letter in enumerate("abcab")])
    assert [one.source for one in runner._grammars._compiled] == ["aa", "bb"]


def test_the_simulated_accelerator_follows_grammars(info: ModelInfo) -> None:
    settings = Settings(device="simulated", sim="base=0", max_num_seqs=4, max_num_batched_tokens=64)
    backend = SimulatedBackend(settings, info)
    one, broken = sequence(1, GRAMMARS[0]), sequence(2, Grammar(REGEX, "("))
    free = sequence(3, max_tokens=4)
    run(backend, [one, broken, free])
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", text_of(one))
    assert (broken.finish, free.finish) == (FinishReason.ERROR, FinishReason.LENGTH)


def tiny_id(text: str) -> int:
    [token] = tiny_tokenizer().encode(text).ids
    return int(token)

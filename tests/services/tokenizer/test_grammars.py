from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.tokenizer import grammars
from services.tokenizer.grammars import PARAM, Grammars
from shared.messages import Refused, Route, Submit
from shared.model import ModelInfo, read_model_info
from shared.sampling import Grammar, GrammarKind, SamplingParams
from shared.types import RequestId, int32s

JSON, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK
DEEP = 20_000  # links of a chain that the library follows by recursion


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ModelInfo:
    return read_model_info(model_dir)


@pytest.fixture
async def checker(model: ModelInfo) -> AsyncIterator[Grammars]:
    checker = Grammars(model)
    yield checker
    await checker.close()


def request(kind: GrammarKind, source: str) -> Submit:
    params = SamplingParams(seed=1, grammar=Grammar(kind, source))
    return Submit(RequestId("r"), int32s([1]), params, Route("gateway.0", "detokenizer.0"))


def schema(**keywords: object) -> Submit:
    return request(JSON, json.dumps(keywords))


def nested(depth: int) -> Submit:
    source = '{"type": "string"}'
    for _ in range(depth):
        source = f'{{"type": "object", "properties": {{"a": {source}}}}}'
    return request(JSON, source)


def linked(link: str) -> Submit:
    """A chain of definitions; `link` is one of them, with NEXT for the name of the next."""
    definitions = {f"d{i}": json.loads(link.replace("NEXT", f"d{i + 1}")) for i in range(DEEP)}
    definitions[f"d{DEEP}"] = {"type": "string"}
    return schema(**{"$ref": "#/$defs/d0", "$defs": definitions})


GOOD = {
    "any object": schema(type="object"),
    "recursive": schema(
        **{
            "$ref": "#/$defs/tree",
            "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        }
    ),
    "large enum": schema(enum=[f"value {number}" for number in range(20_000)]),
    "tagged union": schema(
        oneOf=[
            {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]}
            for name in "ab"
        ]
    ),
    "as nested as a person would write": nested(30),
    "regex": request(REGEX, r"\d{3}-\d{4}"),
    "lark": request(LARK, 'start: "a" start | "b"'),
    "choices": request(LARK, "start: CHOICE\nCHOICE: " + " | ".join(f'"{i}"' for i in range(1000))),
}

SLOW = schema(type="integer", multipleOf=9_999_991)  # the library makes as many states

BAD = {
    "unknown type": (schema(type="objekt"), "objekt"),
    "reference to itself": (schema(**{"$ref": "#"}), "no text that fits"),
    "reference to nowhere": (schema(**{"$ref": "#/$defs/x"}), "/$defs/x"),
    "reference to elsewhere": (schema(**{"$ref": "http://127.0.0.1:1/x"}), "http://127.0.0.1:1/x"),
    "broken pattern": (schema(type="string", pattern="("), "unclosed group"),
    "unsatisfiable": (schema(type="integer", minimum=5, maximum=3), "minimum"),
    "what cannot be followed": (schema(type="array", uniqueItems=True), "uniqueItems"),
    "no json": (request(JSON, '{"type": '), "expected value"),
    "too deep": (nested(500), "recursion limit"),
    "too large": (schema(enum=list(range(140_000))), "too "),
    "recursion of the library": (linked('{"$ref": "#/$defs/NEXT"}'), "too complex"),
    "broken regex": (request(REGEX, "("), "unclosed group"),
    "regex that looks ahead": (request(REGEX, "(?=a)b"), "look-around"),
    "regex that fails later": (schema(enum=["ab" * 500_000]), "too "),
    "lark without a start": (request(LARK, 'begin: "a"'), "Expected ::="),
    "lark with an unknown name": (request(LARK, 'start: "a" x'), "x"),
    "ambiguous": (request(LARK, "start: " + " | ".join(f'"{i}"' for i in range(3000))), "2000"),
    "broken gbnf": (request(LARK, 'root ::= "a" x'), "x"),
    "nested gbnf": (request(LARK, f'root ::= {"(" * 10_000}"a"{")" * 10_000}'), "too deep"),
    "slow gbnf": (
        request(
            LARK,
            "root ::= r0\n"
            + "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000))
            + 'r9000 ::= "a"',
        ),
        "too much time",  # for the converter, which goes over all rules again and again
    ),
}


async def test_what_can_be_followed_goes_on_as_it_is(checker: Grammars) -> None:
    for name, good in GOOD.items():
        assert await checker.check(good) is good, name


async def test_every_fault_is_a_refusal_with_its_reason(checker: Grammars) -> None:
    """One process for all, as far as it survives them; and it is as good as new after each."""
    for name, (bad, reason) in BAD.items():
        answer = await checker.check(bad)
        assert isinstance(answer, Refused), name
        failure = answer.failure
        assert (failure.status, failure.param, failure.code) == (400, PARAM, "invalid_grammar")
        assert reason in failure.message, name
        assert len(failure.message) <= grammars.MAX_REASON_CHARS
        assert await checker.check(GOOD["any object"]) is GOOD["any object"]


async def test_gbnf_becomes_lark(checker: Grammars) -> None:
    asked = request(LARK, 'root ::= "x" [0-9]+ inner?\ninner ::= "(" root ")"')
    for _ in range(2):  # the second time it is remembered
        answer = await checker.check(asked)
        assert isinstance(answer, Submit)
        grammar = answer.params.grammar
        assert grammar is not None and grammar.source.startswith("%llguidance")
        assert replace(answer, params=replace(answer.params, grammar=asked.params.grammar)) == asked
        assert await checker.check(answer) is answer


async def test_equal_grammars_are_checked_once_and_others_wait_their_turn(
    checker: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 2)
    slow, quick = SLOW, GOOD["regex"]
    asked = [asyncio.create_task(checker.check(one)) for one in (slow, slow, quick, quick)]
    await asyncio.sleep(0)
    turned_away = await checker.check(GOOD["lark"])
    assert isinstance(turned_away, Refused) and turned_away.failure.status == 503
    first, second, *goods = await asyncio.gather(*asked)
    assert isinstance(first, Refused) and first == second
    assert "too much time" in first.failure.message
    assert goods == [quick, quick]


async def test_what_was_asked_least_recently_is_forgotten(
    checker: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KNOWN", 2)
    for letter in "abacab":
        await checker.check(request(REGEX, letter))
    assert len(checker._known) == 2


async def test_a_model_without_an_end_follows_no_grammar(model: ModelInfo) -> None:
    checker = Grammars(replace(model, eos_token_ids=frozenset()))
    answer = await checker.check(GOOD["regex"])
    assert isinstance(answer, Refused) and "no end-of-sequence id" in answer.failure.message
    await checker.close()

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from services.gateway.errors import ApiError
from services.gateway.grammar_fields import MAX_SOURCE_CHARS, WHITESPACE, read_grammar
from shared.grammars import compile_grammar, read_vocabulary
from shared.model import ModelInfo, read_model_info
from shared.sampling import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
DEFAULT = {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def schema_of(**fields: Any) -> dict[str, Any]:
    grammar = read_grammar(fields)
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    schema: dict[str, Any] = json.loads(grammar.source)
    return schema


def format_of(schema: Any = SCHEMA, **others: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **others}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "temperature": 1},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "choice": [], "regex": None}},
        {"guided_choice": [], "guided_decoding_backend": "xgrammar"},
    ],
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert read_grammar(fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": format_of()},
        {"response_format": format_of(strict=True, description="d")},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}},
        {"guided_json": SCHEMA, "response_format": {"type": "text"}},
        {"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "outlines"},
    ],
)
def test_a_schema_in_every_dialect(fields: dict[str, Any]) -> None:
    assert schema_of(**fields) == SCHEMA | DEFAULT


def test_any_object() -> None:
    expected = {"type": "object"} | DEFAULT
    assert schema_of(response_format={"type": "json_object"}) == expected
    assert schema_of(structured_outputs={"json_object": True}) == expected


def test_whitespace_is_as_asked_for() -> None:
    def options(**fields: Any) -> Any:
        return schema_of(**fields)["x-guidance"]

    assert options(guided_json=SCHEMA, guided_whitespace_pattern=" *") == {
        "whitespace_pattern": " *"
    }
    asked: dict[str, Any] = {"json": SCHEMA, "whitespace_pattern": " "}
    assert options(structured_outputs=asked) == {"whitespace_pattern": " "}
    asked = {"json": SCHEMA, "disable_any_whitespace": True}
    assert options(structured_outputs=asked) == {"whitespace_flexible": False}
    own = {**SCHEMA, "x-guidance": {"item_separator": ", "}}
    assert options(response_format=format_of(own)) == {"item_separator": ", "}


def test_objects_can_be_closed() -> None:
    schema: dict[str, Any] = {
        "anyOf": [SCHEMA, {"patternProperties": {}, "additionalProperties": True}, {}]
    }
    asked = {"json": schema, "disable_additional_properties": True}
    closed = schema_of(structured_outputs=asked)["anyOf"]
    assert closed == [SCHEMA | {"additionalProperties": False}, schema["anyOf"][1], {}]


@pytest.mark.parametrize(
    ("name", "value", "grammar"),
    [
        ("regex", "a+", Grammar(GrammarKind.REGEX, "a+")),
        ("grammar", 'start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
        ("choice", ["a", "b+"], Grammar(GrammarKind.REGEX, r"a|b\+")),
    ],
)
def test_the_other_constraints(name: str, value: Any, grammar: Grammar) -> None:
    assert read_grammar({f"guided_{name}": value}) == grammar
    assert read_grammar({"structured_outputs": {name: value}}) == grammar


BAD: list[tuple[str, Any]] = [
    ("response_format", "json"),
    ("response_format", {}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "structural_tag", "structures": []}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "n"}}),
    ("response_format", format_of("{}")),
    ("response_format", format_of([])),
    ("response_format", format_of(strict="yes")),
    ("response_format", format_of(name=1)),
    ("response_format", format_of({"enum": ["x" * MAX_SOURCE_CHARS]})),
    ("structured_outputs", []),
    ("structured_outputs", {"structural_tag": "{}"}),
    ("structured_outputs", {"regex": "a", "json": {}}),
    ("structured_outputs", {"regex": 5}),
    ("structured_outputs", {"json": True}),
    ("structured_outputs", {"json_object": 1}),
    ("structured_outputs", {"json": {}, "disable_any_whitespace": "yes"}),
    ("structured_outputs", {"json": {}, "whitespace_pattern": 1}),
    ("guided_json", "{"),
    ("guided_json", "[" * 100_000),
    ("guided_json", "[]"),
    ("guided_regex", ""),
    ("guided_regex", "\ud800"),
    ("guided_regex", "x" * (MAX_SOURCE_CHARS + 1)),
    ("guided_grammar", ["a"]),
    ("guided_choice", "a"),
    ("guided_choice", ["a", ""]),
    ("guided_choice", ["a", 1]),
    ("guided_choice", ["\udfff"]),
    ("guided_decoding_backend", 1),
    ("guided_whitespace_pattern", []),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD)])
def test_what_cannot_be_read_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read_grammar({name: value})
    assert (caught.value.failure.status, caught.value.failure.param) == (400, name)
    assert caught.value.failure.message.startswith(name)


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):
        schema = {"not": schema}
    for options in ({}, {"disable_additional_properties": True}):
        with pytest.raises(ApiError, match="nested too deeply"):
            read_grammar({"structured_outputs": {"json": schema, **options}})


def test_only_one_can_be_asked_for() -> None:
    fields = {"response_format": {"type": "json_object"}, "guided_regex": "a", "guided_choice": []}
    with pytest.raises(ApiError, match="guided_regex, response_format") as caught:
        read_grammar(fields)
    assert caught.value.failure.param == "guided_regex"


@pytest.fixture(scope="module")
def model(model_dir: Any) -> ModelInfo:
    return read_model_info(model_dir)


def test_choices_are_taken_literally(model: ModelInfo) -> None:
    vocabulary = read_vocabulary(model.path, model.vocab_size, model.eos_token_ids)
    choices = [
        "plain",
        'a"b\\n',
        "\n\t\x01\x7f",
        "(.*)|[x]",
        "é漢🙂",
        " spaced ",
        "/a/i",
        "a{2}",
        "\r\n",
    ]
    grammar = read_grammar({"guided_choice": choices})
    assert grammar is not None
    for choice in choices:
        matcher = compile_grammar(vocabulary, grammar)
        assert matcher.consume_tokens(vocabulary.tokenize_str(choice)), choice
        assert matcher.is_stopped() and not matcher.is_error()
    other = compile_grammar(vocabulary, grammar)
    assert not other.consume_tokens(vocabulary.tokenize_str("xx"))


def test_json_is_written_on_one_line_or_indented_and_not_in_endless_space(model: ModelInfo) -> None:
    vocabulary = read_vocabulary(model.path, model.vocab_size, model.eos_token_ids)
    grammar = read_grammar({"response_format": {"type": "json_object"}})
    assert grammar is not None

    def taken(text: str) -> bool:
        ids = vocabulary.tokenize_str(text)
        return compile_grammar(vocabulary, grammar).try_consume_tokens(ids) == len(ids)

    value = {"a": [1, {"b": None}], "c": "x  \n y"}
    for indent in (None, 0, 1, 2, 4, 8, "\t"):
        assert taken(json.dumps(value, indent=indent)), indent
    assert taken(json.dumps(value, separators=(",", ":")))
    for text in ("{  ", "{\n\n", '{"a":' + " " * 50, '{"a": 1\n\n'):
        assert not taken(text), text

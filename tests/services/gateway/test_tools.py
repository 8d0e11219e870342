"""Tools of requests: what is refused, what the model is told, what it has to write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.body import parse
from services.gateway.dialects.chat import ChatBody
from services.gateway.errors import ApiError
from services.gateway.parsing.answers import Formats
from services.gateway.parsing.formats import tool_format
from services.gateway.request import Context, GenerationRequest
from shared.sampling import Grammar, GrammarKind

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Now.", "parameters": CITY},
}
OTHER = {"type": "function", "function": {"name": "now"}}
MESSAGES = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "now"}}


def read(formats: Formats | None = None, **fields: Any) -> GenerationRequest:
    formats = formats or Formats(tool_format("hermes", ""))
    raw = json.dumps({"messages": MESSAGES, **fields}).encode()
    return parse(ChatBody, raw).to_request(Context("m", 100, 2048, lambda: 1, formats=formats))


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param", "naming"),
    [
        ({"tools": 5}, "tools", "tools"),
        ({"tools": [5]}, "tools", "tools.0"),
        ({"tools": [{}]}, "tools", "tools.0.type"),
        ({"tools": [{"type": "web"}]}, "tools", "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools.0.function.name"),
        ({"tools": function(name="a b")}, "tools", "tools.0.function.name"),
        ({"tools": function(name="a" * 65)}, "tools", "tools.0.function.name"),
        ({"tools": function(description=5)}, "tools", "tools.0.function.description"),
        ({"tools": function(parameters=[])}, "tools", "tools.0.function.parameters"),
        ({"tools": function(parameters={"type": "string"})}, "tools", "parameters.type"),
        ({"tools": function(parameters={"properties": []})}, "tools", "parameters.properties"),
        ({"tools": function(parameters={"properties": {"a": 5}})}, "tools", "properties.a"),
        ({"tools": function(parameters={"required": "a"})}, "tools", "parameters.required"),
        ({"tools": function(strict="yes")}, "tools", "tools.0.function.strict"),
        ({"tools": [TOOL, TOOL]}, "tools", "tools[1].function.name"),
        ({"tools": [TOOL] * 129}, "tools", "tools"),
        ({"tool_choice": "auto"}, "tool_choice", "tools"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice", "tools"),
        ({"tool_choice": NAMED, "tools": [TOOL]}, "tool_choice", "'now'"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice", "tool_choice"),
        ({"tool_choice": [], "tools": [TOOL]}, "tool_choice", "tool_choice"),
        ({"parallel_tool_calls": 1, "tools": [TOOL]}, "parallel_tool_calls", "parallel"),
        ({"functions": [{"name": "f"}]}, "functions", "functions"),
    ],
    ids=str,
)
def test_refusals(fields: dict[str, Any], param: str, naming: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    failure = caught.value.failure
    assert (failure.status, failure.param) == (400, param)
    assert naming in failure.message


def test_a_server_without_a_parser_refuses() -> None:
    with pytest.raises(ApiError, match="tools"):
        read(Formats(), tools=[TOOL])


def test_what_the_template_is_given() -> None:
    (prompt,) = read(tools=[TOOL, OTHER]).prompts
    assert json.loads(prompt.chat or "")["tools"] == [TOOL, OTHER]
    without: list[dict[str, Any]] = [{"tools": [TOOL], "tool_choice": "none"}, {"tools": None}]
    for fields in [*without, {"tools": []}]:
        (prompt,) = read(**fields).prompts
        assert "tools" not in json.loads(prompt.chat or "")


def test_plain_requests_have_no_parser() -> None:
    none: dict[str, Any] = {"tool_choice": "none"}
    for fields in ({}, none, none | {"tools": [TOOL]}):
        request = read(**fields)
        assert request.new_parser is None
        assert request.params.grammar is None


@pytest.mark.parametrize("choice", ["auto", None])
def test_free_answers_have_a_parser_and_no_grammar(choice: str | None) -> None:
    request = read(tools=[TOOL], tool_choice=choice)
    assert request.new_parser is not None
    assert request.params.grammar is None
    assert request.params.skip_special_tokens


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_have_a_grammar(choice: Any) -> None:
    request = read(tools=[TOOL, OTHER], tool_choice=choice)
    assert request.params.grammar is not None
    assert request.params.grammar.kind is GrammarKind.LARK
    assert ("get_weather" in request.params.grammar.source) == (choice == "required")


def test_special_tokens_among_the_marks_are_not_skipped() -> None:
    special = {"[TOOL_CALLS]": 5, "[ARGS]": 6}
    formats = Formats(tool_format("mistral", "[ARGS]"), special_tokens=special)
    assert not read(formats, tools=[TOOL]).params.skip_special_tokens
    assert read(formats).params.skip_special_tokens
    request = read(formats, tools=[OTHER], tool_choice="required")
    assert "<[5]> group" in (request.params.grammar or Grammar(GrammarKind.LARK, "")).source


def test_what_cannot_be_combined_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        read(tools=[TOOL], guided_regex="yes|no")
    assert caught.value.failure.param == "guided_regex"
    assert read(tools=[TOOL], guided_regex="yes|no", tool_choice="none").params.grammar
    wanted = {"type": "json_object"}
    for choice, content in (("auto", True), ("required", False)):
        request = read(tools=[TOOL], response_format=wanted, tool_choice=choice)
        assert request.params.grammar is not None
        assert ("content: %json" in request.params.grammar.source) is content

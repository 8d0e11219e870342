"""What holds for all parsers and any text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.output import Content, PlainParser
from services.gateway.parsing.reasoning import Marks, ReasoningParser
from services.gateway.parsing.tool_parser import ToolParser
from tests.services.gateway.parsing.texts import (
    CALLS,
    FORMATS,
    PARSERS,
    TEXTS,
    Writer,
    cut,
    make,
    parsed,
    parts_of,
)

THINK = Marks("<think>", "</think>")
PLACES = st.lists(st.integers(0, 400), max_size=30)


@pytest.mark.parametrize("kind", PARSERS)
@given(TEXTS, PLACES)
def test_cuts_make_no_difference(kind: type[ToolParser], text: str, places: list[int]) -> None:
    whole = parts_of(make(kind), [text])
    assert parts_of(make(kind), cut(text, places)) == whole
    assert parts_of(make(kind), text) == whole  # one character at a time


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize("inside", [True, False])
@given(TEXTS, PLACES)
def test_cuts_of_reasoning_and_calls_make_no_difference(
    kind: type[ToolParser], inside: bool, text: str, places: list[int]
) -> None:
    def parser() -> ReasoningParser:
        return ReasoningParser(THINK, make(kind), inside=inside)

    whole = parts_of(parser(), [text])
    assert parts_of(parser(), cut(text, places)) == whole
    assert parts_of(parser(), text) == whole


@pytest.mark.parametrize("kind", PARSERS)
@given(TEXTS)
def test_without_a_call_every_character_is_content(kind: type[ToolParser], text: str) -> None:
    parts = parts_of(make(kind, frozenset()), [text])
    assert parts == ([Content(text)] if text else [])


@pytest.mark.parametrize("kind", PARSERS)
@given(TEXTS)
def test_no_character_is_made_up(kind: type[ToolParser], text: str) -> None:
    """Content stands in the text, in its order."""
    assert is_within(parsed(make(kind), [text]).content, text)


def is_within(part: str, text: str) -> bool:
    rest = iter(text)
    return all(character in rest for character in part)


@pytest.mark.parametrize(("kind", "write"), FORMATS)
@given(st.lists(CALLS, min_size=1, max_size=3), PLACES)
def test_calls_come_back_as_they_were(
    kind: type[ToolParser], write: Writer, calls: list[tuple[str, Any]], places: list[int]
) -> None:
    found = parsed(make(kind), cut(write(calls), places))
    assert found.objects == calls
    assert found.content == ""


@pytest.mark.parametrize(("kind", "write"), FORMATS)
@given(st.lists(CALLS, min_size=1, max_size=2), st.integers(0, 400))
def test_what_is_cut_off_is_the_beginning_of_what_would_have_been(
    kind: type[ToolParser], write: Writer, calls: list[tuple[str, Any]], place: int
) -> None:
    whole = parsed(make(kind), [write(calls)])
    part = parsed(make(kind), [write(calls)[:place]])
    for (name, arguments), (own, own_arguments) in zip(whole.calls, part.calls, strict=False):
        assert (name, arguments[: len(own_arguments)]) == (own, own_arguments)


@pytest.mark.parametrize("inside", [True, False])
@given(st.text(), st.text(), PLACES)
def test_reasoning_comes_back(inside: bool, thought: str, answer: str, places: list[int]) -> None:
    thought, answer = thought.strip(), answer.lstrip()
    text = f"{'' if inside else '<think>'}\n{thought}\n</think>\n\n{answer}"
    found = parsed(ReasoningParser(THINK, PlainParser(), inside=inside), cut(text, places))
    assert (found.reasoning, found.content) == (thought, answer)


@pytest.mark.parametrize(("kind", "write"), FORMATS[:-1])
def test_arguments_come_piece_by_piece(kind: type[ToolParser], write: Writer) -> None:
    calls = [("f", {"text": "many words, one after the other", "n": [1, 2, {"x": None}]})]
    parser = make(kind)
    pieces = [parser.feed(character) for character in write(calls)]
    assert sum(map(bool, pieces)) > len(json.dumps(calls[0][1])) // 2

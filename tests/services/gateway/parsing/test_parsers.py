"""Answers as models write them, right and wrong, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.output import PlainParser, ToolArguments, ToolCall
from services.gateway.parsing.hermes import HermesParser
from services.gateway.parsing.llama3_json import Llama3JsonParser
from services.gateway.parsing.mistral import MistralParser
from services.gateway.parsing.part_filter import PartFilter, of_calls, of_first_call
from services.gateway.parsing.pythonic import PythonicParser
from services.gateway.parsing.reasoning import Marks, ReasoningParser
from services.gateway.parsing.tool_parser import ToolParser
from tests.services.gateway.parsing.texts import Parsed, make, parsed

CALL = '{"name": "f", "arguments": {"a": 1}}'
F = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Sure.\n\n<tool_call>\n{CALL}\n</tool_call>\n", "Sure.", [F]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> So.", "So.", [F, F]),
        (f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", [F, F]),
        (f"<tool_call>\n{CALL}", "", [F]),  # no mark at the end
        (f"<tool_call>\n{CALL}\n</tool", "", [F]),
        (f"<tool_call>{CALL}\n\nText", "Text", [F]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f", "id": 7, "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
            "",
            [("f", '{"a": "x\\ny"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": tr', "", [("f", '{"a": tr')]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": truth}}',
            "truth}}",
            [("f", '{"a": ')],
        ),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(make(HermesParser), [text]) == Parsed(content, "", calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{'name': 'f'}\n</tool_call>",
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',  # not a function of the request
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"\\ud800\\": 1}"}</tool_call>',
        '<tool_call>{"thought": "hm", "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "name": "f"}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call> <tool_call> <tool",
        "a < b, and no more  ",
        '{"name": "f", "arguments": {}}',
    ],
)
def test_what_is_no_call_for_hermes_is_content(text: str) -> None:
    assert parsed(make(HermesParser), [text]) == Parsed(text)


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        (Llama3JsonParser, '{"name": "f", "parameters": {"a": 1}}', "", [F]),
        (Llama3JsonParser, f" <|python_tag|> {CALL}; {CALL};", "", [F, F]),
        (Llama3JsonParser, f"Well: <|python_tag|>{CALL}", "Well:", [F]),
        (Llama3JsonParser, f"{CALL}\nDone.", "Done.", [F]),
        (Llama3JsonParser, f"{CALL}; no", "; no", [F]),
        (Llama3JsonParser, '{"answer": 42}', '{"answer": 42}', []),
        (Llama3JsonParser, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (Llama3JsonParser, f"It is {CALL}", f"It is {CALL}", []),
        (MistralParser, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [F, F]),
        (MistralParser, f"Well [TOOL_CALLS][{CALL}] so", "Wellso", [F]),
        (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"a": 1}', "", [F, F]),
        (MistralParser, '[TOOL_CALLS]f[CALL_ID]Ab3[ARGS]{"a": 1}', "", [F]),
        (MistralParser, "[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}", []),
        (MistralParser, f"[TOOL_CALLS][{CALL}, x]", ", x]", [F]),
        (PythonicParser, "[f(a=1), f(a=1)]", "", [F, F]),
        (PythonicParser, "<|python_start|>[f(a=1,)]<|python_end|>", "", [F]),
        (PythonicParser, "[f(a=1)]\nDone.", "Done.", [F]),
        (PythonicParser, '[f(a="]), (", b=\'"\')]', "", [("f", '{"a": "]), (", "b": "\\""}')]),
        (PythonicParser, "[f(a=[-1.5, None, true, {'x': ()}])]", "",
         [("f", '{"a": [-1.5, null, true, {"x": []}]}')]),
        (PythonicParser, "[f(from='Rome')]", "", [("f", '{"from": "Rome"}')]),
        (PythonicParser, "[f()]", "", [("f", "{}")]),
        (PythonicParser, "[f(a=1), oh", ", oh", [F]),
        (PythonicParser, "[1] says [this](url)", "[1] says [this](url)", []),
    ],
)  # fmt: skip
def test_the_others(
    kind: type[ToolParser], text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed(make(kind), [text]) == Parsed(content, "", calls)


@pytest.mark.parametrize(
    "arguments",
    [
        "__import__('os').system('x')",
        "1",
        "a=open('x')",
        "a=b",
        "a=1, a=2",
        "**{'a': 1}",
        "a=1e999",
        "a={1: 2}",
        "a={1, 2}",
        "a=b'x'",
        "a=1j",
        "a='\\ud800'",
        "a=f'{x}'",
        "a=[x for x in y]",
        "a=" + "[" * 500 + "]" * 500,
        "a=" + "-" * 100_000 + "1",
        "a=" + "9" * 10_000,
        "a='x",
        "a=(1]",
    ],
    ids=lambda text: text[:30],
)
def test_only_literals_are_read_from_python(arguments: str) -> None:
    text = f"[f({arguments})]"
    assert parsed(make(PythonicParser), [text]) == Parsed(text)


def test_filters() -> None:
    text = f"Well. <tool_call>{CALL}</tool_call> <tool_call>{CALL}</tool_call> <tool"
    assert parsed(PartFilter(make(HermesParser), of_first_call), text).calls == [F]
    assert parsed(PartFilter(make(HermesParser), of_calls), text) == Parsed(calls=[F, F])


def test_ids_are_those_asked_for() -> None:
    parser = make(HermesParser)
    assert parser.feed(f"<tool_call>{CALL}</tool_call>") == [
        ToolCall(0, "id0", "f"),
        ToolArguments(0, '{"a": 1}'),
    ]
    assert parser.flush() == []


THINK = Marks("<think>", "</think>")


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>\nhm\n</think>\n\nYes.", Parsed("Yes.", "hm")),
        (True, "hm\n</think>\n\nYes.", Parsed("Yes.", "hm")),
        (True, "<think>hm</think>Yes.", Parsed("Yes.", "hm")),
        (False, "\n <think>hm", Parsed("", "hm")),
        (False, "<think>\n\n</think>\n\nYes.", Parsed("Yes.")),
        (False, "  No <think>hm</think>", Parsed("  No <think>hm</think>")),
        (False, "<thin", Parsed("<thin")),
        (
            True,
            f"<tool_call>{CALL}</tool_call></think>",
            Parsed("", f"<tool_call>{CALL}</tool_call>"),
        ),
        (True, f"hm</think>\n<tool_call>{CALL}</tool_call>", Parsed("", "hm", [F])),
    ],
)
def test_reasoning(inside: bool, text: str, expected: Any) -> None:
    parser = ReasoningParser(THINK, make(HermesParser), inside=inside)
    assert parsed(parser, [text]) == expected
    assert parsed(ReasoningParser(THINK, PlainParser(), inside=inside), text).calls == []

"""Texts as models write them, and ways to have them parsed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from services.gateway.output import Content, OutputParser, Part, Reasoning, ToolArguments, ToolCall
from services.gateway.parsing.hermes import HermesParser
from services.gateway.parsing.llama3_json import Llama3JsonParser
from services.gateway.parsing.mistral import MistralParser
from services.gateway.parsing.part_parser import merged
from services.gateway.parsing.pythonic import PythonicParser
from services.gateway.parsing.tool_parser import ToolParser

NAMES = frozenset({"f", "get_weather"})
PARSERS = (HermesParser, Llama3JsonParser, MistralParser, PythonicParser)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True).filter(str.isidentifier)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)
CALLS = st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS)
# Marks, and what may stand between them, whole and broken.
SNIPPETS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool_", "</tool", '{"name":"f","arguments":{', '"id":'),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>"),
        *("<|python_start|>", "<|python_end|>", "[f(", "get_weather(", "a=", "'x'", "None", "\\q"),
        *('{"name":', '"f"', '"get_weather"', '"arguments":', '"parameters":', '"a":1', '"\\"}"'),
        *("{}", ",", ";", "[", "]", "(", ")", "}", '"', "'", "\\", "\\u00", "\\u00e9", "012", "-1"),
        *("tru", "true", "null", "1.5e3", " ", "\n", " \n\t", "text", "é🫠", "\x00", " " * 70),
    ]
)
TEXTS = st.lists(SNIPPETS | st.text(max_size=5), max_size=20).map("".join)


@dataclass
class Parsed:
    """What came of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments

    @property
    def objects(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def make(kind: type[ToolParser], names: frozenset[str] = NAMES) -> ToolParser:
    ids = itertools.count()
    return kind(names, lambda: f"id{next(ids)}")


def parts_of(parser: OutputParser, pieces: Iterable[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged(parts + parser.flush())


def parsed(parser: OutputParser, pieces: Iterable[str]) -> Parsed:
    """The parts put together, as a client does."""
    found = Parsed()
    for part in parts_of(parser, pieces):
        match part:
            case Content(text):
                found.content += text
            case Reasoning(text):
                found.reasoning += text
            case ToolCall(index, _, name):
                assert index == len(found.calls)
                found.calls.append((name, ""))
            case ToolArguments(index, text):
                name, arguments = found.calls[index]
                found.calls[index] = (name, arguments + text)
    return found


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def write_hermes(calls: list[tuple[str, Any]]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def write_llama3(calls: list[tuple[str, Any]]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def write_mistral_list(calls: list[tuple[str, Any]]) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(objects, ensure_ascii=False)}"


def write_mistral(calls: list[tuple[str, Any]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def write_pythonic(calls: list[tuple[str, Any]]) -> str:
    return f"[{', '.join(_python_call(*call) for call in calls)}]"


def _python_call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


Writer = Callable[[list[tuple[str, Any]]], str]
FORMATS: list[tuple[type[ToolParser], Writer]] = [
    (HermesParser, write_hermes),
    (Llama3JsonParser, write_llama3),
    (MistralParser, write_mistral_list),
    (MistralParser, write_mistral),
    (PythonicParser, write_pythonic),
]

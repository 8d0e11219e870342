"""What grammars for answers allow is what the parsers read, down to the last token."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from services.gateway.parsing.answers import Formats
from services.gateway.parsing.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_LIST,
    PYTHONIC,
    ToolFormat,
)
from services.gateway.parsing.thinking import THINK, Thinking, Thoughts
from services.gateway.tool_use import Function, ToolChoice, ToolUse
from shared.chat_template import ChatTemplate
from shared.grammars import compile_grammar, read_vocabulary
from shared.model import read_model_info
from shared.sampling import Grammar, GrammarKind
from tests.services.gateway.parsing.texts import Parsed, parsed

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", 'a "b"', "é\n"]},
        "days": {"$ref": "#/$defs/Days"},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 7}},
}
FUNCTIONS = [Function("get_weather", CITY, strict=True), Function("now")]
ONE = [FUNCTIONS[0]]
FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "mistral_list": MISTRAL_LIST,
    "pythonic": PYTHONIC,
}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": [1, 2]}},
    "required": ["answer"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(ANSWER))
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def vocabulary(model_dir: Path) -> LLTokenizer:
    info = read_model_info(model_dir)
    return read_vocabulary(model_dir, info.vocab_size, info.eos_token_ids)


def write(matcher: LLMatcher, vocabulary: LLTokenizer, start: str, seed: int) -> str:
    """Go on at random from a beginning, ending as soon as that is allowed."""
    ids = list(vocabulary.tokenize_str(start))
    assert matcher.try_consume_tokens(ids) == len(ids), start
    draw = random.Random(seed)
    while not (matcher.is_accepting() and len(ids) > 1) and len(ids) < MAX_TOKENS:
        mask = matcher.compute_bitmask()
        while True:
            token = draw.randrange(vocabulary.vocab_size)
            if mask[token // 8] >> token % 8 & 1:
                break
        ids.append(token)
        matcher.consume_token(ids[-1])
        assert not matcher.is_error(), matcher.get_error()
    text: str = vocabulary.decode_str(ids)
    return text


def answer(
    vocabulary: LLTokenizer,
    format: ToolFormat,
    use: ToolUse,
    *,
    seed: int = 0,
    start: str = "",
    thinking: Thinking = Thinking.OVER,
    content: Grammar | None = None,
) -> Parsed:
    """A random answer that fits, as it is read."""
    thoughts = Thoughts(THINK, ChatTemplate("", {}), unsaid=False)
    made = Formats(format, thoughts).of_answer(use, thinking, content)
    assert made.grammar is not None
    assert made.new_parser is not None
    matcher = compile_grammar(vocabulary, made.grammar)
    return parsed(made.new_parser(), [write(matcher, vocabulary, start, seed)])


def check_calls(found: Parsed) -> None:
    schemas = {function.name: function.parameters for function in FUNCTIONS}
    for name, arguments in found.objects:
        jsonschema.validate(arguments, schemas[name] or {"type": "object", "maxProperties": 0})


def begun(format: ToolFormat) -> str:
    """A whole call, and what must be between it and the next."""
    notation = format.notation
    before, after = notation.call
    call = f"{before.replace('NAME', 'now')}{{}}{after}"
    if notation.call_break is not None:
        return f"{notation.mark}{notation.lead}{call}{notation.call_break}"
    group = f"{notation.mark}{notation.lead}{call}{notation.tail}"
    return f"{group}{notation.group_break}{notation.mark}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("use", "most"),
    [
        (ToolUse(FUNCTIONS, ToolChoice.REQUIRED), 9),
        (ToolUse(FUNCTIONS, ToolChoice.REQUIRED, parallel=False), 1),
        (ToolUse(ONE, ToolChoice.NAMED), 1),
    ],
    ids=["required", "one", "named"],
)
def test_forced_calls(vocabulary: LLTokenizer, name: str, use: ToolUse, most: int) -> None:
    for seed in range(2):
        found = answer(vocabulary, FORMATS[name], use, seed=seed)
        assert (found.content, found.reasoning) == ("", "")
        assert 1 <= len(found.calls) <= most
        check_calls(found)


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls(vocabulary: LLTokenizer, name: str) -> None:
    use = ToolUse(FUNCTIONS, ToolChoice.REQUIRED)
    found = answer(vocabulary, FORMATS[name], use, start=begun(FORMATS[name]))
    assert found.content == ""
    assert len(found.calls) >= 2
    check_calls(found)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("thinking", "opening"), [(Thinking.BEGUN, ""), (Thinking.POSSIBLE, "<think>")]
)
def test_forced_calls_after_thoughts(
    vocabulary: LLTokenizer, name: str, thinking: Thinking, opening: str
) -> None:
    use = ToolUse(ONE, ToolChoice.NAMED)
    start = f"{opening}a call? <tool_call> [TOOL_CALLS] {{}} </think>\n\n"
    found = answer(vocabulary, FORMATS[name], use, start=start, thinking=thinking)
    assert found.reasoning == "a call? <tool_call> [TOOL_CALLS] {}"
    assert (found.content, len(found.calls)) == ("", 1)
    check_calls(found)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_list"])
def test_free_answers_with_strict_calls(vocabulary: LLTokenizer, name: str) -> None:
    """Only the arguments of strict functions are held to their schemas."""
    format = FORMATS[name]
    use = ToolUse([FUNCTIONS[0], Function("now", CITY)], parallel=False)
    text = "Hello {there}" if format.notation.mark else ""
    start = text + begun(format).replace("now", "get_weather").split("{}")[0]
    for seed in range(2):
        found = answer(vocabulary, format, use, start=start, seed=seed)
        assert found.content.startswith(text)
        assert found.calls[0][0] == "get_weather"
        jsonschema.validate(found.objects[0][1], CITY)
    found = answer(vocabulary, format, use, start=text + begun(format).split("{}")[0] + '{"x": 1}')
    assert found.objects[0] == ("now", {"x": 1})
    assert answer(vocabulary, format, use, start="Only text").content.startswith("Only text")


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_list"])
def test_calls_or_json(vocabulary: LLTokenizer, name: str) -> None:
    use = ToolUse(ONE)
    found = answer(vocabulary, FORMATS[name], use, start='{"answer"', content=JSON)
    assert "answer" in json.loads(found.content)
    start = begun(FORMATS[name]).replace("now", "get_weather").split("{}")[0]
    found = answer(vocabulary, FORMATS[name], use, start=start, content=JSON)
    assert found.calls[0][0] == "get_weather"
    assert found.content == ""


def test_json_after_thoughts(vocabulary: LLTokenizer) -> None:
    thoughts = Thoughts(THINK, ChatTemplate("", {}), unsaid=False)
    made = Formats(HERMES, thoughts).of_answer(None, Thinking.BEGUN, JSON)
    assert made.grammar is not None
    assert made.new_parser is not None
    matcher = compile_grammar(vocabulary, made.grammar)
    found = parsed(made.new_parser(), [write(matcher, vocabulary, "hm {</think>", 0)])
    assert found.reasoning == "hm {"
    assert "answer" in json.loads(found.content)


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
def test_what_does_not_go_together(format: ToolFormat) -> None:
    words = Grammar(GrammarKind.REGEX, "yes|no")
    with pytest.raises(ValueError, match="tools"):
        Formats(format).of_answer(ToolUse(ONE), Thinking.OVER, words)
    with pytest.raises(ValueError, match="tools"):
        Formats(PYTHONIC).of_answer(ToolUse(ONE), Thinking.OVER, JSON)
    thoughts = Thoughts(THINK, ChatTemplate("", {}), unsaid=False)
    made = Formats(format, thoughts).of_answer(None, Thinking.BEGUN, words)
    assert (made.grammar, made.new_parser) == (words, None)


def test_special_tokens_stand_by_their_ids(vocabulary: LLTokenizer) -> None:
    special = {"[TOOL_CALLS]": 3, "[ARGS]": 4, "<think>": 5, "</think>": 6}
    thoughts = Thoughts(THINK, ChatTemplate("", {}), unsaid=False)
    formats = Formats(MISTRAL, thoughts, special)
    for use in (ToolUse(FUNCTIONS, ToolChoice.REQUIRED), ToolUse(FUNCTIONS)):
        made = formats.of_answer(use, Thinking.POSSIBLE)
        assert made.special_marks
        assert made.grammar is not None
        matcher = compile_grammar(vocabulary, made.grammar)
        ids = [5, *vocabulary.tokenize_str("hm"), 6, 3, *vocabulary.tokenize_str("now"), 4]
        assert matcher.try_consume_tokens(ids) == len(ids)

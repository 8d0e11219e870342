"""How a model writes is read off its chat template, unless a setting says it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.gateway.parsing.answers import Formats
from services.gateway.parsing.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_LIST,
    PYTHONIC,
    ToolFormat,
    call_id,
    mistral_call_id,
)
from services.gateway.parsing.thinking import THINK, Thinking
from shared.model import read_model_info

# The parts of well-known templates that matter here.
QWEN3 = """{%- if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{%- endif %}
{%- for message in messages %}{{ message.role + message.content }}{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '\n<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
THINKING_ONLY = "{% if add_generation_prompt %}{{ 'assistant\n<think>\n' }}{% endif %}"
HYBRID = """{% if '</think>' in messages[0].content %}{% endif %}
{%- if add_generation_prompt %}A{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"""
LLAMA = "{% if tools %}{{ tools }}<|python_tag|>{% endif %}"
LLAMA_LIST = "{% if tools %}[func_name1(params_name1=value1)]{{ tools }}{% endif %}"
MISTRAL_OLD = "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS][{% endif %}"
MISTRAL_NEW = "{% if tools %}{{ tools }}[TOOL_CALLS]f[ARGS]{% endif %}[THINK][/THINK]"
PLAIN = "{{ messages[0].content }}<tool_call>[TOOL_CALLS]"


@pytest.fixture
def tiny(tiny_model: Path) -> Any:
    info = read_model_info(tiny_model)
    return lambda template: replace(info, chat_template=template)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, HERMES),
        (LLAMA, LLAMA3_JSON),
        (LLAMA_LIST, PYTHONIC),
        (MISTRAL_OLD, MISTRAL_LIST),
        (MISTRAL_NEW, MISTRAL),
        (PLAIN, HERMES),
        ("{{ tools }}", HERMES),
        (None, HERMES),
        ("{% broken", None),
    ],
)
def test_calls(tiny: Any, template: str | None, expected: ToolFormat | None) -> None:
    assert Formats.of(tiny(template), "auto", "auto").tools is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", None),
        ("hermes", HERMES),
        ("llama3_json", LLAMA3_JSON),
        ("pythonic", PYTHONIC),
        ("mistral", MISTRAL_LIST),
    ],
)
def test_settings_win(tiny: Any, name: str, expected: ToolFormat | None) -> None:
    assert Formats.of(tiny(QWEN3), name, "auto").tools is expected


@pytest.mark.parametrize(
    ("template", "setting", "variables", "expected"),
    [
        (QWEN3, "auto", {}, Thinking.POSSIBLE),
        (QWEN3, "auto", {"enable_thinking": True}, Thinking.POSSIBLE),
        (QWEN3, "auto", {"enable_thinking": False}, Thinking.OVER),
        (QWEN3, "auto", {"other": "x" * 1000}, Thinking.POSSIBLE),
        (QWEN3, "qwen3", {}, Thinking.POSSIBLE),
        (QWEN3, "deepseek_r1", {}, Thinking.BEGUN),
        (QWEN3, "deepseek_r1", {"enable_thinking": False}, Thinking.OVER),
        (THINKING_ONLY, "qwen3", {}, Thinking.BEGUN),
        (HYBRID, "auto", {}, Thinking.OVER),
        (HYBRID, "auto", {"thinking": True}, Thinking.BEGUN),
        ("{{ raise_exception('no') }}</think>", "auto", {}, Thinking.POSSIBLE),
    ],
)
def test_where_reasoning_stands(
    tiny: Any, template: str, setting: str, variables: dict[str, Any], expected: Thinking
) -> None:
    thoughts = Formats.of(tiny(template), "auto", setting).thoughts
    assert thoughts is not None
    assert thoughts.marks == THINK
    assert thoughts.at_start(variables) is expected


@pytest.mark.parametrize("setting", ["auto", "none"])
def test_models_that_do_not_think(tiny: Any, setting: str) -> None:
    template = PLAIN if setting == "auto" else QWEN3
    assert Formats.of(tiny(template), "auto", setting).thoughts is None


def test_messages_to_be_continued(tiny: Any) -> None:
    thoughts = Formats.of(tiny(QWEN3), "auto", "auto").thoughts
    assert thoughts is not None
    assert thoughts.in_text("<think>hm") is Thinking.BEGUN
    assert thoughts.in_text("<think>hm</think>So") is Thinking.OVER
    assert thoughts.in_text("So") is Thinking.OVER


def test_ids() -> None:
    assert re.fullmatch("call_[0-9a-f]{24}", call_id())
    assert re.fullmatch("[0-9a-zA-Z]{9}", mistral_call_id())
    assert len({call_id() for _ in range(100)} | {mistral_call_id() for _ in range(100)}) == 200

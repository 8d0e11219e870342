from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from services.tokenizer.encoder import Encoder
from shared.chat_template import ChatError, ChatTemplate
from shared.model import read_model_info

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

# Shapes of templates that are in wide use.
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
INST = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""
HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|end|>" }}
{%- if tools is not none %}{{- tools | tojson(indent=2) }}{%- endif %}
{{- system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {% generation %}{{- '<|' + message['role'] + '|>' + message.content | trim }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>" }}{%- endif %}"""
NAMESPACED = """{% set ns = namespace(last=-1) %}
{% for message in messages %}
  {% if message.role == "user" %}
    {% set ns.last = loop.index0 %}
  {% endif %}
{% endfor %}
{% for message in messages %}
  {% if message.name is defined %}({{ message.name | upper }}){% endif %}
{% if message.content is defined %}{{ message | tojson }}{% endif %}
{{ " *" if loop.index0 == ns.last else "" }}
{% endfor %}
{{ strftime_now("%Y") }}{{ messages | map(attribute="role") | join(",") }}"""
TEMPLATES = {"chatml": CHATML, "inst": INST, "headers": HEADERS, "namespaced": NAMESPACED}

USER = {"role": "user", "content": "  What is <b>2 & 2</b>, 'é' or 🫠?\n"}
ASSISTANT = {"role": "assistant", "content": "Four, "}
SYSTEM = {"role": "system", "content": "Be brief. "}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, ASSISTANT],
    [USER, ASSISTANT, {**USER, "name": "ada"}],
    [SYSTEM, USER, ASSISTANT],
    [{**USER, "content": ""}],
]


def expected(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What transformers renders."""
    variables: dict[str, Any] = {**SPECIALS, **options}
    rendered = render_jinja_template([messages], chat_template=source, **variables)
    return str(rendered[0][0])


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    chat = json.dumps({"messages": messages, **options}, ensure_ascii=False)
    return ChatTemplate(source, SPECIALS).render(chat)


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}], ids=str
)
def test_a_chat_is_rendered_as_transformers_renders_it(
    name: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    source = TEMPLATES[name]
    try:
        text = expected(source, messages, **options)
    except Exception:  # jinja2's own, or what the template calls
        with pytest.raises(ChatError):
            render(source, messages, **options)
    else:
        assert render(source, messages, **options) == text


def test_tools_and_other_variables_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    assert render(HEADERS, [USER], tools=tools) == expected(HEADERS, [USER], tools=tools)
    assert render("{{ thinking }}", [USER], thinking=True) == "True"


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_real_template_gives_the_ids_of_transformers(
    model_dir: Path, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    """R109: with the special tokens that the template writes, and no others."""
    info = read_model_info(model_dir)
    specials = {"bos_token": info.bos_token, "eos_token": info.eos_token}
    assert info.chat_template is not None
    chat = json.dumps({"messages": messages, "add_generation_prompt": add_generation_prompt})
    text = ChatTemplate(info.chat_template, specials).render(chat)
    ids = AutoTokenizer.from_pretrained(model_dir).apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    [column] = Encoder(model_dir).encode([text], add_special_tokens=False)
    assert column.tolist() == ids


@given(st.text(), st.booleans())
def test_a_continued_message_ends_with_its_own_text(content: str, system: bool) -> None:
    messages = [SYSTEM, USER] if system else [USER]
    messages = [*messages, {"role": "assistant", "content": content}]
    text = render(CHATML, messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n" + content)


@pytest.mark.parametrize("source", ["{{ broken", "{% for %}", "{% nothing %}"])
def test_a_broken_template_says_so(source: str) -> None:
    with pytest.raises(ChatError, match="broken"):
        ChatTemplate(source, SPECIALS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{% for i in range(10**9) %}{% endfor %}",  # the sandbox bounds ranges
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ none.x.y }}",
    ],
)
def test_a_template_that_goes_too_far_is_a_refusal(source: str) -> None:
    """R107: templates run in a sandbox, within limits."""
    with pytest.raises(ChatError, match="refused"):
        render(source, [USER])


@pytest.mark.parametrize(
    "chat",
    [
        "",
        "[]",
        "{}",
        '{"messages": []}',
        '{"messages": [5]}',
        '{"messages": 5}',
        '{"messages": [{"role": "user"}], "continue_final_message": true}',
        "[" * 100_000,
    ],
    ids=lambda chat: chat[:20],
)
def test_what_is_no_chat_is_a_refusal(chat: str) -> None:
    with pytest.raises(ChatError):
        ChatTemplate(CHATML, SPECIALS).render(chat)


def test_reasons_are_short() -> None:
    with pytest.raises(ChatError) as raised:
        render("{{ raise_exception(messages[0].content) }}", [{"content": "x" * 100_000}])
    assert len(str(raised.value)) < 1000

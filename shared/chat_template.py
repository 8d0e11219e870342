"""Chat templates, rendered as transformers renders them: same environment, same variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.tool_prompt import in_words

CUT = "HEADRACE_CUT_THE_CHAT_HERE "  # the space shows whether the template strips messages
MAX_REASON_CHARS = 500


class ChatError(Exception):
    """A template, or the messages given to it, cannot be used; the text says why."""


class ChatTemplate:
    """A model's template; only what it is given can reach it, and it cannot change that."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ChatError for a template that is not valid Jinja.

        `special_tokens` are the variables bos_token and so on; one that is "" stays undefined.
        """
        self._special_tokens = {name: text for name, text in special_tokens.items() if text}
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.uses_tools = "tools" in find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ChatError(f"The chat template is broken: {_reason(error)}") from error

    def render(self, chat: str) -> str:
        """The text for a chat as `Prompt.chat` holds it; raises ChatError."""
        messages, variables = _read(chat)
        if not self.uses_tools:
            messages = _in_words(messages, variables)
        if not variables.pop("continue_final_message", False):
            return self._render(messages, variables)
        # The last message is marked at its end, and whatever the template puts behind is cut off.
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise ChatError("The final message has no text that could be continued.")
        text = self._render([*messages[:-1], {**messages[-1], "content": content + CUT}], variables)
        place = text.rfind(CUT.strip())
        if place < 0 or content.strip() not in text:
            raise ChatError("The chat template drops the final message: it cannot be continued.")
        preserved = text.startswith(CUT, place)
        return text[:place] if preserved else text[:place].rstrip()

    def _render(self, messages: list[Any], variables: dict[str, Any]) -> str:
        defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
        known = {**self._special_tokens, **defaults, **variables}
        try:
            return self._template.render(messages=messages, **known)
        except Exception as error:  # a template is a program: it may raise anything
            raise ChatError(f"The chat template refused: {_reason(error)}") from error


def _read(chat: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages, without what is null in them but content, and the other variables."""
    try:
        variables = json.loads(chat)
        messages = variables.pop("messages")
        if not messages:
            raise ChatError("A chat has at least one message.")
        return [_without_null(message) for message in messages], variables
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ChatError(f"The messages cannot be read: {_reason(error)}") from error


def _in_words(messages: list[dict[str, Any]], variables: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        return in_words(messages, variables.get("tools"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ChatError(f"The calls cannot be read: {_reason(error)}") from error


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in message.items() if value is not None or name == "content"
    }


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_REASON_CHARS]


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, which only training needs."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own: no escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

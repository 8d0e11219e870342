"""The ways in which models write calls, and which of them a model has."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.parsing import hermes, llama3_json, mistral, pythonic
from services.gateway.parsing.answer_grammar import Notation
from services.gateway.parsing.tool_parser import ToolParser

AUTO, NONE = "auto", "none"
ID_CHARACTERS = string.ascii_letters + string.digits
MISTRAL_ID_SIZE = 9  # its templates refuse others


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(MISTRAL_ID_SIZE))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls."""

    parser: type[ToolParser]
    notation: Notation
    forced_parser: type[ToolParser]  # of answers that follow the notation
    marks: tuple[str, ...]
    new_id: Callable[[], str] = call_id

    @property
    def writes_notation(self) -> bool:
        """Whether free answers have it, too."""
        return self.parser is self.forced_parser


HERMES = ToolFormat(
    hermes.HermesParser,
    Notation(mark=hermes.OPEN, lead="\n", tail=f"\n{hermes.CLOSE}", group_break="\n"),
    hermes.HermesParser,
    (hermes.OPEN, hermes.CLOSE),
)
LLAMA3_JSON = ToolFormat(
    llama3_json.Llama3JsonParser,
    Notation(call=('{"name": "NAME", "parameters": ', "}"), call_break="; "),
    llama3_json.Llama3JsonParser,
    (llama3_json.MARK,),
)
MISTRAL_MARKS = (mistral.MARK, mistral.CALL_ID, mistral.ARGS)
MISTRAL = ToolFormat(
    mistral.MistralParser,
    Notation(mark=mistral.MARK, call=(f"NAME{mistral.ARGS}", ""), group_break=""),
    mistral.MistralParser,
    MISTRAL_MARKS,
    mistral_call_id,
)
MISTRAL_LIST = ToolFormat(
    mistral.MistralParser,
    Notation(mark=mistral.MARK, lead="[", tail="]", call_break=", "),
    mistral.MistralParser,
    MISTRAL_MARKS,
    mistral_call_id,
)
PYTHONIC = ToolFormat(
    pythonic.PythonicParser,
    LLAMA3_JSON.notation,  # a JSON schema says nothing of Python
    llama3_json.Llama3JsonParser,
    (pythonic.START, pythonic.END),
)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """`template` is the source of a chat template that writes tools, else ""."""
    match name:
        case "none":
            return None
        case "hermes":
            return HERMES
        case "llama3_json":
            return LLAMA3_JSON
        case "pythonic":
            return PYTHONIC
        case "mistral":
            return MISTRAL if mistral.ARGS in template else MISTRAL_LIST
    return _found(template)


def _found(template: str) -> ToolFormat:
    if mistral.MARK in template:
        return MISTRAL if mistral.ARGS in template else MISTRAL_LIST
    if hermes.OPEN in template:
        return HERMES
    if pythonic.START in template or "[func_name1(" in template:
        return PYTHONIC
    if llama3_json.MARK in template or '"parameters": dictionary' in template:
        return LLAMA3_JSON
    return HERMES  # as tools are told where the template cannot tell them

"""Grammars for answers with calls, in the words that a model has learnt for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.parsing.reasoning import Marks
from services.gateway.tool_use import Function, ToolUse

# Without it, models that are forced to write JSON go on with white space for ever.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FREE_SPACING = {"whitespace_pattern": r"[ \t]?|\n[ \t]{0,40}"}
ANY_ARGUMENTS = {"type": "object", "x-guidance": FREE_SPACING}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# Beside these, `properties` does not say which properties there are.
_OPEN_KEYWORDS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf"}
    | {"anyOf", "oneOf", "if", "not", "dependentSchemas"}
)


@dataclass(frozen=True, slots=True)
class Notation:
    """calls: mark group [group_break mark group ...]; group: lead call [call_break call ...] tail.

    None for a break: there is only one. With no mark, calls are all of the answer.
    """

    mark: str = ""
    lead: str = ""
    call: tuple[str, str] = ('{"name": "NAME", "arguments": ', "}")  # around the arguments
    tail: str = ""
    group_break: str | None = None
    call_break: str | None = None


class AnswerGrammar:
    """Lark source as llguidance reads it: thoughts, and then calls, content, or either."""

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        calls: tuple[Notation, ToolUse] | None,
        thoughts: Marks | None = None,
        content: str | None = None,
    ) -> None:
        """`special_tokens`: the ids of texts that are no text; `content`: its JSON schema."""
        self._ids = special_tokens
        self._calls = calls
        self._thoughts = thoughts
        self._content = content

    def source(self, *, thinking: bool) -> str:
        """`thinking`: the thoughts have begun before the answer."""
        start = "" if self._thoughts is None else "thought" if thinking else "thoughts?"
        rules = [f"start: {start} answer", *self._thought()]
        if self._content is not None:
            rules.append(f"content: %json {self._content}")
        if self._calls is None:
            rules.append("answer: content")
        else:
            notation, use = self._calls
            calls = _CallRules(self._ids, notation, use)
            rules += calls.free() if self._is_free(use) else calls.strict()
            either = self._content is not None and not use.forced
            rules += [] if self._is_free(use) else [f"answer: calls{' | content' * either}"]
        return "\n".join(rules) + "\n"

    def _is_free(self, use: ToolUse) -> bool:
        return self._content is None and not use.forced

    def _thought(self) -> list[str]:
        if self._thoughts is None:
            return []
        opening, closing = terminals(self._thoughts.open, self._ids), self._thoughts.close
        rules = [f"thoughts: {opening} thought", r'thought: end "\n"? "\n"?']
        if closing in self._ids:
            return [*rules, f"end: ANY {terminals(closing, self._ids)}", "ANY: /(?s:.*)/"]
        return [*rules, f"end[suffix={json.dumps(closing)}]: /(?s:.*)/"]


class _CallRules:
    def __init__(self, special_tokens: Mapping[str, int], notation: Notation, use: ToolUse) -> None:
        self._ids = special_tokens
        self._notation = notation
        self._use = use

    def strict(self) -> list[str]:
        """Nothing but calls."""
        groups = self._repeated("marked", self._notation.group_break)
        return [f"calls: {groups}", f"marked: {self._mark} group", *self._group()]

    def free(self) -> list[str]:
        """Any text, but whatever begins as a call is one."""
        mark = self._notation.mark
        if not mark:
            return ["answer: TEXT | group", r"TEXT: /\s*([^{\s](?s:.*))?/", *self._group()]
        groups = "(lead group)+" if self._use.many else "lead group"
        rules = [f"answer: TEXT | {groups} TEXT?", *self._group()]
        if mark in self._ids:  # which no text contains
            return [*rules, f"lead: TEXT {self._mark}", "TEXT: /(?s:.*)/"]
        within = re.escape(mark).replace("/", r"\/")
        rules.append(f"lead[suffix={json.dumps(mark)}]: /(?s:.*)/")
        return [*rules, rf"TEXT: /(?s:.*)/ & ~/(?s:.*){within}(?s:.*)/"]

    def _group(self) -> list[str]:
        notation, functions = self._notation, self._use.functions
        lead, tail = terminals(notation.lead, self._ids), terminals(notation.tail, self._ids)
        names = " | ".join(f"call_{place}" for place in range(len(functions)))
        rules = [f"group: {lead} {self._repeated('call', notation.call_break)} {tail}"]
        rules.append(f"call: {names}")
        before, after = notation.call
        for place, function in enumerate(functions):
            words = terminals(before.replace("NAME", function.name), self._ids)
            end = terminals(after, self._ids)
            rules.append(f"call_{place}: {words} arguments_{place} {end}")
            exact = self._use.forced or function.strict
            schema = _schema(function) if exact else ANY_ARGUMENTS
            rules.append(f"arguments_{place}: %json {json.dumps(schema)}")
        return rules

    @property
    def _mark(self) -> str:
        return terminals(self._notation.mark, self._ids)

    def _repeated(self, rule: str, separator: str | None) -> str:
        if separator is None or not self._use.many:
            return rule
        return f"{rule} ({terminals(separator, self._ids)} {rule})*"


def terminals(text: str, special_tokens: Mapping[str, int]) -> str:
    """For a text in which special tokens stand by their ids."""
    specials = "|".join(map(re.escape, special_tokens))
    pieces = re.split(f"({specials})", text) if specials else [text]
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else json.dumps(piece)
        for piece in pieces
        if piece
    )


def _schema(function: Function) -> dict[str, Any]:
    """Of the arguments; what a non-strict one says beyond what can be enforced is passed over."""
    schema = function.parameters
    if not schema:
        return NO_ARGUMENTS | {"x-guidance": SPACING}
    closed: dict[str, Any] = {"type": "object"}
    if schema.get("properties") and not _OPEN_KEYWORDS & schema.keys():
        closed["additionalProperties"] = False
    return closed | schema | {"x-guidance": {**SPACING, "lenient": not function.strict}}

"""How answers are made and read: with which grammar, by which parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from services.gateway.output import OutputParser, PlainParser
from services.gateway.parsing.answer_grammar import AnswerGrammar
from services.gateway.parsing.formats import ToolFormat, tool_format
from services.gateway.parsing.part_filter import PartFilter, of_calls, of_first_call
from services.gateway.parsing.reasoning import ReasoningParser
from services.gateway.parsing.thinking import UNSAID, Thinking, Thoughts, reasoning_marks
from services.gateway.tool_use import ToolUse
from shared.chat_template import ChatError, ChatTemplate
from shared.model import ModelInfo
from shared.sampling import Grammar, GrammarKind, SamplingParams

Calls: TypeAlias = tuple[ToolFormat, ToolUse]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Of one request's answers."""

    grammar: Grammar | None = None
    new_parser: Callable[[], OutputParser] | None = None  # for each choice; None: all is content
    special_marks: bool = False  # there are special tokens among the marks

    def apply(self, params: SamplingParams) -> SamplingParams:
        skipped = params.skip_special_tokens and not self.special_marks
        return replace(params, grammar=self.grammar, skip_special_tokens=skipped)


@dataclass(frozen=True, slots=True)
class Formats:
    """Of one model."""

    tools: ToolFormat | None = None
    thoughts: Thoughts | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelInfo, tool_parser: str, reasoning_parser: str) -> Formats:
        """By the settings' names, where they are not `auto`."""
        source = model.chat_template or ""
        specials = {"bos_token": model.bos_token, "eos_token": model.eos_token}
        try:
            template = ChatTemplate(source, specials)
        except ChatError:  # whoever chats will hear of it
            return cls()
        marks = reasoning_marks(reasoning_parser, source)
        return cls(
            tool_format(tool_parser, source if template.uses_tools else ""),
            Thoughts(marks, template, reasoning_parser in UNSAID) if marks else None,
            model.special_tokens,
        )

    def of_answer(
        self, use: ToolUse | None, thinking: Thinking, grammar: Grammar | None = None
    ) -> AnswerFormat:
        """`thinking`: where it stands when the answer begins; `grammar`: for what is no call.

        Raises ValueError for a grammar that does not go together with calls.
        """
        calls = None if use is None or self.tools is None else (self.tools, use)
        thoughts = None if thinking is Thinking.OVER else self.thoughts
        if calls is not None and calls[1].forced:
            grammar = None  # there will be no content
        if grammar is not None and not (_is_json(grammar) and _mixes(calls)):
            if calls is not None:
                raise ValueError("cannot be combined with tools here; set tool_choice")
            thoughts = None  # it cannot be put behind them
        if calls is None and thoughts is None:
            return AnswerFormat(grammar)
        marks = {*(calls[0].marks if calls else ())}
        marks |= {thoughts.marks.open, thoughts.marks.close} if thoughts else set()
        return AnswerFormat(
            self._grammar(calls, thoughts, thinking, grammar),
            lambda: _parser(calls, thoughts, thinking),
            special_marks=not marks.isdisjoint(self.special_tokens),
        )

    def _grammar(
        self,
        calls: Calls | None,
        thoughts: Thoughts | None,
        thinking: Thinking,
        grammar: Grammar | None,
    ) -> Grammar | None:
        content = None if grammar is None else grammar.source
        noted = None
        if calls is not None:
            format, use = calls
            noted = (format.notation, use)
            strict = use.strict and format.writes_notation
            if not use.forced and not strict and content is None:
                return None
        elif content is None:
            return None
        marks = None if thoughts is None else thoughts.marks
        answer = AnswerGrammar(self.special_tokens, noted, marks, content)
        source = answer.source(thinking=thinking is Thinking.BEGUN)
        return Grammar(GrammarKind.LARK, source)


def _parser(calls: Calls | None, thoughts: Thoughts | None, thinking: Thinking) -> OutputParser:
    answer = PlainParser() if calls is None else _call_parser(*calls)
    if thoughts is None:
        return answer
    return ReasoningParser(thoughts.marks, answer, inside=thinking is Thinking.BEGUN)


def _is_json(grammar: Grammar) -> bool:
    return grammar.kind is GrammarKind.JSON_SCHEMA


def _mixes(calls: Calls | None) -> bool:
    """Whether content that is JSON, and calls, are told apart by their first character."""
    return calls is None or (calls[0].writes_notation and calls[0].notation.mark != "")


def _call_parser(format: ToolFormat, use: ToolUse) -> OutputParser:
    kind = format.forced_parser if use.forced else format.parser
    parser: OutputParser = kind(use.names, format.new_id)
    if use.forced:
        parser = PartFilter(parser, of_calls)
    return parser if use.many else PartFilter(parser, of_first_call)

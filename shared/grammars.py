"""Grammars as llguidance compiles them: the same where they are checked and where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from tokenizers import Tokenizer

from shared.sampling import Grammar, GrammarKind

# Whoever sends a grammar that is hard to follow spends his own time, not that of the whole batch:
# with these, the mask of a token takes 0.1 s at the very worst.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)

_COMPILERS: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
    # As in JSON schemas, digits and letters are those of ASCII.
    GrammarKind.REGEX: lambda regex: f"start: /{regex_to_lark(regex, 'dw')}/",
    GrammarKind.LARK: LLMatcher.grammar_from_lark,
}


def read_vocabulary(path: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """The bytes of every token of `path`/tokenizer.json; raises ValueError if they are not known.

    A grammar ends with any of the end ids.
    """
    ends = sorted(eos_token_ids)
    if not ends:
        raise ValueError("the model has no end-of-sequence id")
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=ends)
    except Exception as error:  # the libraries raise nothing more special
        raise ValueError(f"the model's tokenizer cannot be used: {error}") from error


def compile_grammar(vocabulary: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher before the first token; raises ValueError with the place that is at fault."""
    matcher = LLMatcher(
        vocabulary, _COMPILERS[grammar.kind](grammar.source), log_level=0, limits=LIMITS
    )
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher

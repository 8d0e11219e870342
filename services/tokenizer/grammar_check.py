"""A process that tries grammars, so that one that crashes or never ends takes no service with it.

`python -m services.tokenizer.grammar_check MODEL VOCAB_SIZE END_ID...` reads [kind, source] from
a line of JSON, and writes a line with [reason, source]: why the grammar is refused, or null and
the source to use. The first line is about the model: why it can follow no grammars, or null.
The process ends itself, by a signal, when a grammar takes too much time or memory.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from shared.grammars import compile_grammar, read_vocabulary
from shared.sampling import Grammar, GrammarKind

CPU_SECONDS = 0.5  # what the executor would then need, too, while others wait for it
MEMORY_BYTES = 3 << 30  # of address space, of which the libraries take the most
NOTHING_FITS = "there is no text that fits it"
TRIAL_TOKENS = 4  # some grammars fail with their first tokens only


def try_grammar(vocabulary: LLTokenizer, grammar: Grammar) -> Grammar:
    """The grammar in a form that the executor takes; raises ValueError."""
    if grammar.kind is GrammarKind.LARK:
        grammar = Grammar(GrammarKind.LARK, _lark(grammar.source))
    matcher = compile_grammar(vocabulary, grammar)
    for _ in range(TRIAL_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped():
            break
        for end in vocabulary.eos_tokens:
            mask &= ~(1 << end)
        if not mask:
            break
        matcher.consume_token(mask.bit_length() - 1)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return grammar


def _lark(source: str) -> str:
    """From llama.cpp's notation, if it is in that."""
    try:
        return any_to_lark(source)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises nothing more special
        raise ValueError(str(error)) from error


def _verdict(vocabulary: LLTokenizer, line: bytes) -> tuple[str | None, str]:
    kind, source = json.loads(line)
    try:
        return None, try_grammar(vocabulary, Grammar(GrammarKind(kind), source)).source
    except ValueError as error:
        reason = str(error).removesuffix("\n<non-verbose/>")
        return NOTHING_FITS if reason.startswith("NoExtension") else reason, ""


def main(path: str, vocab_size: str, *eos_token_ids: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        vocabulary = read_vocabulary(Path(path), int(vocab_size), map(int, eos_token_ids))
    except ValueError as error:
        print(json.dumps((str(error), "")), flush=True)
        return
    print(json.dumps((None, "")), flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # nobody handles the signal
        verdict = _verdict(vocabulary, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

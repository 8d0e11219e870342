"""Answers as blocks: the same however the text comes, and every token in one of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.blocks import Begun, Block, BlockKind, BlockReader, Ended, Grown
from services.gateway.output import PlainParser
from services.gateway.parsing.hermes import HermesParser
from services.gateway.parsing.reasoning import Marks, ReasoningParser
from services.gateway.tokens import Token

PIECES = ["<think>", "\n", "Wh", "y?", "</think>", "\n\n", "Be", "cause", '<tool_call>\n{"name": ']
PIECES += ['"f", "arguments": {"a"', ": 1}}", "\n</tool_call>"]
KINDS = [BlockKind.THOUGHT, BlockKind.TEXT, BlockKind.CALL]
TEXTS = ["Why?", "Because", '{"a": 1}']


def reader() -> BlockReader:
    calls = HermesParser(frozenset({"f"}), lambda: "call_1")
    return BlockReader(ReasoningParser(Marks("<think>", "</think>"), calls, inside=False))


def tokens_of(pieces: list[str]) -> list[Token]:
    """One token for each piece."""
    starts = [len("".join(pieces[:place])) for place in range(len(pieces))]
    return [Token(id, b"", id, start, 0.0, 1, []) for id, start in enumerate(starts)]


def ids(block: Block) -> list[int]:
    return [token.id for token in block.tokens]


@given(st.sets(st.integers(1, len(PIECES) - 1)))
def test_tokens_are_in_the_block_of_their_text(cuts: set[int]) -> None:
    reading, steps = reader(), []
    tokens, bounds = tokens_of(PIECES), [0, *sorted(cuts), len(PIECES)]
    for begin, end in pairwise(bounds):
        steps += reading.feed("".join(PIECES[begin:end]), tokens[begin:end])
    steps += reading.end()
    assert [block.kind for block in reading.blocks] == KINDS
    assert [block.text for block in reading.blocks] == TEXTS
    assert [ids(block) for block in reading.blocks] == [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert reading.thought_tokens == 6
    for block in reading.blocks:
        own = [step for step in steps if step.block is block]
        assert isinstance(own[0], Begun)
        assert isinstance(own[-1], Ended)
        grown = [step for step in own if isinstance(step, Grown)]
        assert len(grown) == len(own) - 2
        assert "".join(step.text for step in grown) == block.text
        assert [token.id for step in grown for token in step.tokens] == ids(block)
    assert [step.block.index for step in steps] == sorted(step.block.index for step in steps)


@given(st.lists(st.integers(0, 90)))
def test_without_tokens_the_blocks_are_the_same(cuts: list[int]) -> None:
    text, reading = "".join(PIECES), reader()
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for begin, end in pairwise(bounds):
        reading.feed(text[begin:end])
    reading.end()
    assert [(block.kind, block.text) for block in reading.blocks] == list(
        zip(KINDS, TEXTS, strict=True)
    )
    assert (reading.blocks[2].id, reading.blocks[2].name) == ("call_1", "f")
    assert reading.thought_tokens == 0


def test_tokens_may_lag_behind_their_text_or_be_ahead_of_it() -> None:
    """As they do where a text is held back that may be a stop string."""
    tokens = tokens_of(["ab", "c", "de"])
    for feeds in (
        [("abcde", []), ("", tokens)],
        [("a", tokens), ("bcde", [])],
        [("", tokens[:2]), ("abcde", tokens[2:])],
    ):
        reading = BlockReader(PlainParser())
        steps = [step for text, told in feeds for step in reading.feed(text, told)]
        (block,) = reading.blocks
        assert block.text == "abcde"
        assert ids(block) == [0, 1, 2]
        grown = [step for step in steps if isinstance(step, Grown)]
        assert "".join(step.text for step in grown) == "abcde"


def test_an_empty_answer() -> None:
    assert BlockReader(PlainParser()).read("", []) == []
    (block,) = BlockReader(PlainParser()).read("", [], never_empty=True)
    assert (block.kind, block.text) == (BlockKind.TEXT, "")

"""An answer as blocks: thoughts, texts and calls, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from typing import TypeAlias

from services.gateway.output import Content, OutputParser, Part, Reasoning, ToolArguments, ToolCall
from services.gateway.tokens import Token


class BlockKind(Enum):
    TEXT = auto()
    THOUGHT = auto()
    CALL = auto()


@dataclass(slots=True, eq=False)
class Block:
    index: int  # in its answer
    kind: BlockKind
    id: str = ""  # of a call
    name: str = ""  # of a call's function
    text: str = ""  # so far; of a call: its arguments
    tokens: list[Token] = field(default_factory=list)  # so far, if they were asked for


@dataclass(frozen=True, slots=True)
class Begun:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    text: str
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Ended:
    block: Block


Step: TypeAlias = Begun | Grown | Ended


class BlockReader:
    """Reads one answer. A block's steps are Begun, any number of Grown, and Ended.

    A token belongs to the block in which its text ends. Marks around thoughts and calls are part of
    no text, so theirs belong to the block before, or to the first one.
    """

    def __init__(self, parser: OutputParser) -> None:
        self.blocks: list[Block] = []
        self._parser = parser
        self._read = 0  # characters of the answer
        self._early: list[Token] = []  # before the first block
        self._open = False  # the last block

    def feed(self, text: str, tokens: Sequence[Token] = ()) -> list[Step]:
        """More of the answer, and the tokens behind it."""
        steps: list[Step] = []
        if not tokens:
            steps += self._feed(text, [])
        for token, piece in _cut(text, self._read, tokens):
            steps += self._feed(piece, [token])
        self._read += len(text)
        return list(_joined(steps))

    def end(self, *, never_empty: bool = False) -> list[Step]:
        """The last steps; `never_empty`: an answer of nothing is an empty text."""
        steps = self._steps(self._parser.flush())
        if never_empty and not self.blocks:
            steps.append(self._begin(BlockKind.TEXT))
        return [*steps, *self._close()]

    def read(self, text: str, tokens: Sequence[Token], *, never_empty: bool = False) -> list[Block]:
        """All of an answer at once."""
        self.feed(text, tokens)
        self.end(never_empty=never_empty)
        return self.blocks

    @property
    def thought_tokens(self) -> int:
        """With those of the marks; 0 if no tokens were told."""
        return sum(len(one.tokens) for one in self.blocks if one.kind is BlockKind.THOUGHT)

    def _feed(self, text: str, tokens: list[Token]) -> list[Step]:
        steps = self._steps(self._parser.feed(text))
        if not tokens:
            return steps
        if not self.blocks:
            self._early += tokens
            return steps
        tokens, self._early = self._early + tokens, []
        self.blocks[-1].tokens += tokens
        return [*steps, Grown(self.blocks[-1], "", tokens)]

    def _steps(self, parts: Iterable[Part]) -> list[Step]:
        return [step for part in parts for step in self._of_part(part)]

    def _of_part(self, part: Part) -> Iterator[Step]:
        match part:
            case ToolCall(_, id, name):
                yield from self._close()
                yield self._begin(BlockKind.CALL, id, name)
            case ToolArguments(_, text):
                yield self._grow(text)
            case Content(text):
                yield from self._in(BlockKind.TEXT)
                yield self._grow(text)
            case Reasoning(text):
                yield from self._in(BlockKind.THOUGHT)
                yield self._grow(text)

    def _in(self, kind: BlockKind) -> Iterator[Step]:
        """See that the last block is of this kind."""
        if not self._open or self.blocks[-1].kind is not kind:
            yield from self._close()
            yield self._begin(kind)

    def _begin(self, kind: BlockKind, id: str = "", name: str = "") -> Begun:
        self.blocks.append(Block(len(self.blocks), kind, id, name))
        self._open = True
        return Begun(self.blocks[-1])

    def _grow(self, text: str) -> Grown:
        self.blocks[-1].text += text
        return Grown(self.blocks[-1], text, [])

    def _close(self) -> Iterator[Step]:
        if self._open:
            self._open = False
            yield Ended(self.blocks[-1])


def _cut(text: str, start: int, tokens: Sequence[Token]) -> Iterator[tuple[Token, str]]:
    """Each token with its part of the text, which begins `start` characters into the answer."""
    at = 0
    for token, following in pairwise(tokens):
        end = max(at, following.text_offset - start)
        yield token, text[at:end]
        at = end
    for token in tokens[-1:]:
        yield token, text[at:]


def _joined(steps: Iterable[Step]) -> Iterator[Step]:
    """The same, with as few of Grown as possible."""
    grown: Grown | None = None
    for step in steps:
        if isinstance(step, Grown):
            known = grown or Grown(step.block, "", [])
            grown = Grown(step.block, known.text + step.text, known.tokens + step.tokens)
            continue
        if grown is not None:
            yield grown
            grown = None
        yield step
    if grown is not None:
        yield grown

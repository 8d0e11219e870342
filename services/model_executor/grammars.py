"""Following grammars: while a forward pass runs, the masks of the tokens to come are made.

A sequence is built when it enters, and advanced when it has sampled, both in threads; whoever
samples next waits for its mask. All that a sequence's mask depends on are its tokens.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from services.model_executor.batch import Ints
from shared.grammars import compile_grammar
from shared.messages import EnteringSequence, Plan
from shared.sampling import Grammar
from shared.types import FinishReason

MAX_COMPILED = 32
MAX_THREADS = 4
PATIENCE_SECONDS = 10.0  # for a mask; far more than a grammar takes that has been checked


class Follower:
    """One sequence's grammar: a thread's while `ready` is pending, else the batch's."""

    __slots__ = ("bitmask", "broken", "matcher", "ready")

    def __init__(self, words: int) -> None:
        self.matcher: LLMatcher | None = None  # before it is built
        self.bitmask = np.full((1, words), -1, np.int32)  # of the next token; one bit each
        self.broken = False  # there can be no next token
        self.ready: Future[None]

    def fill(self) -> None:
        assert self.matcher is not None
        fill_next_token_bitmask(self.matcher, self.bitmask)
        self.broken = self.matcher.is_error()


class Masks(NamedTuple):
    """Of some rows."""

    lines: list[int]  # the rows that have a grammar
    bits: NDArray[np.uint8]  # [rows, bytes], as `apply_token_bitmask` takes them
    broken: NDArray[np.bool_]  # whose grammar cannot go on


class Grammars:
    """The grammars of all slots. Slots without one cost nothing."""

    def __init__(self, load: Callable[[], LLTokenizer], vocab_size: int) -> None:
        """load: reads the vocabulary, once; it takes a second if that is large."""
        self._words = -(-vocab_size // 32)
        self._followers: dict[int, Follower] = {}
        # One thread compiles, so that what it keeps needs no lock, and masks do not wait for it.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._vocabulary = self._compiler.submit(load)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._fillers = ThreadPoolExecutor(self._threads, thread_name_prefix="mask")

    def reset(self) -> None:
        """Drop all sequences."""
        self._followers.clear()

    def apply(self, plan: Plan) -> None:
        """Make a plan's changes."""
        for slot in plan.retired:
            self._followers.pop(slot, None)
        for sequence in plan.entering:
            if sequence.params.grammar is not None:
                self._enter(sequence, sequence.params.grammar)

    def masks(self, slots: Ints) -> Masks | None:
        """Of rows that are about to sample; None if they may sample anything."""
        followers = {
            line: self._followers[slot]
            for line, slot in enumerate(slots.tolist())
            if slot in self._followers
        }
        if not followers:
            return None
        wait({one.ready for one in followers.values()}, PATIENCE_SECONDS)
        bitmasks = np.full((len(slots), self._words), -1, np.int32)
        broken = np.zeros(len(slots), np.bool_)
        for line, follower in followers.items():
            broken[line] = follower.broken or not follower.ready.done()
            if not broken[line]:
                bitmasks[line] = follower.bitmask[0]
        return Masks(list(followers), bitmasks.view(np.uint8), broken)

    def advance(self, slots: Ints, tokens: Ints, finishes: bytes) -> None:
        """Rows have sampled these tokens; those that go on get the masks of their next ones."""
        going = [
            (self._followers[slot], token)
            for slot, token, finish in zip(slots.tolist(), tokens.tolist(), finishes, strict=True)
            if slot in self._followers and finish == FinishReason.NONE
        ]
        for first in range(min(self._threads, len(going))):
            share = going[first :: self._threads]
            future = self._fillers.submit(_advance, share)
            for follower, _ in share:
                follower.ready = future

    def _enter(self, sequence: EnteringSequence, grammar: Grammar) -> None:
        follower = self._followers[sequence.slot] = Follower(self._words)
        generated = sequence.token_ids[sequence.prompt_tokens :].tolist()
        follower.ready = self._compiler.submit(self._build, follower, grammar, generated)

    def _build(self, follower: Follower, grammar: Grammar, generated: list[int]) -> None:
        try:
            follower.matcher = self._compile(grammar).deep_copy()
        except ValueError:
            follower.broken = True
            return
        follower.matcher.consume_tokens(generated)
        follower.fill()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Raises ValueError."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = compile_grammar(self._vocabulary.result(), grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled


def _advance(share: Sequence[tuple[Follower, int]]) -> None:
    for follower, token in share:
        if follower.matcher is not None:
            follower.matcher.consume_token(token)
            follower.fill()

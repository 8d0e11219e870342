"""Following grammars: while a forward pass runs, the masks of the tokens to come are made.

A sequence is built when it enters, and advanced when it has sampled, both in threads; whoever
samples next waits for its mask. All that a sequence's mask depends on are its tokens.

Where a grammar leaves one text, its tokens are not sampled but forced: they are known as soon as
the one before them is, and go through the model all at once. They are those that the tokenizer
makes of the text, so wherever a sequence is interrupted, it goes on with the same.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from services.model_executor.batch import Ints, Rows
from services.model_executor.finish import StopRules
from shared.grammars import compile_grammar
from shared.messages import EnteringSequence, Plan
from shared.sampling import Grammar
from shared.types import FinishReason

MAX_COMPILED = 32
MAX_THREADS = 4
PATIENCE_SECONDS = 10.0  # for a mask; far more than a grammar takes that has been checked


class Follower:
    """One sequence's grammar: a thread's while `ready` is pending, else the batch's."""

    __slots__ = ("bitmask", "broken", "forced", "jumps", "matcher", "ready", "rules")

    def __init__(self, words: int, rules: StopRules, *, jumps: bool) -> None:
        self.rules = rules
        self.jumps = jumps
        self.matcher: LLMatcher | None = None  # before it is built
        self.bitmask = np.full((1, words), -1, np.int32)  # of the next token; one bit each
        self.broken = False  # there can be no next token
        self.forced: list[int] = []  # after what was sampled last
        self.ready: Future[None]

    def step(self, token: int, position: int) -> None:
        """Go on by what was sampled at a position, and by what must follow but no end."""
        assert self.matcher is not None
        self.matcher.consume_token(token)
        room = max(0, self.rules.last - position - 1)
        going_on = takewhile(lambda token: token not in self.rules.end_ids, self._following())
        self.forced = list(islice(going_on, room))
        self.matcher.consume_tokens(self.forced)

    def fill(self) -> None:
        """Make the mask. Of what must come, it leaves the tokenizer's own token alone."""
        assert self.matcher is not None
        following = self._following()
        if following:
            self.bitmask[:] = 0
            word, bit = divmod(following[0], 32)
            self.bitmask.view(np.uint32)[0, word] = 1 << bit
        else:
            fill_next_token_bitmask(self.matcher, self.bitmask)
        self.broken = self.matcher.is_error()

    def _following(self) -> list[int]:
        """The tokens that must come next."""
        assert self.matcher is not None
        return self.matcher.compute_ff_tokens() if self.jumps else []


class Masks(NamedTuple):
    """Of some rows."""

    lines: list[int]  # the rows that have a grammar
    bits: NDArray[np.uint8]  # [rows, bytes], as `apply_token_bitmask` takes them
    broken: NDArray[np.bool_]  # whose grammar cannot go on


class _Sampled(NamedTuple):
    """What a sequence goes on from."""

    slot: int
    follower: Follower
    token: int
    position: int


class Grammars:
    """The grammars of all slots. Slots without one cost nothing."""

    def __init__(self, load: Callable[[], LLTokenizer], vocab_size: int) -> None:
        """load: reads the vocabulary, once; it takes a second if that is large."""
        self._words = -(-vocab_size // 32)
        self._followers: dict[int, Follower] = {}
        self._stepping: dict[int, tuple[Follower, Future[None]]] = {}  # since the last sample
        # One thread compiles, so that what it keeps needs no lock, and masks do not wait for it.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._vocabulary = self._compiler.submit(load)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._fillers = ThreadPoolExecutor(self._threads, thread_name_prefix="mask")

    def reset(self) -> None:
        """Drop all sequences."""
        self._followers.clear()
        self._stepping.clear()

    def apply(self, plan: Plan, rules: Sequence[StopRules]) -> None:
        """Make a plan's changes; `rules` are those of all slots."""
        for slot in plan.retired:
            self._followers.pop(slot, None)
            self._stepping.pop(slot, None)
        for sequence in plan.entering:
            if sequence.params.grammar is not None:
                self._enter(sequence, sequence.params.grammar, rules[sequence.slot])

    def forced(self) -> dict[int, list[int]]:
        """What must come after the tokens sampled last, by slot; each is told of once."""
        if not self._stepping:
            return {}
        wait({stepped for _, stepped in self._stepping.values()}, PATIENCE_SECONDS)
        forced = {}
        for slot, (follower, stepped) in self._stepping.items():
            if not _succeeded(stepped):
                follower.ready = stepped  # given up: no mask is to be waited for
            elif follower.forced:
                forced[slot] = follower.forced
        self._stepping.clear()
        return forced

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
            broken[line] = follower.broken or not _succeeded(follower.ready)
            if not broken[line]:
                bitmasks[line] = follower.bitmask[0]
        return Masks(list(followers), bitmasks.view(np.uint8), broken)

    def advance(self, rows: Rows, tokens: Ints, finishes: bytes) -> None:
        """Rows have sampled these tokens; those that go on get the masks of their next ones."""
        if not self._followers:
            return
        columns = (rows.sampling_slots.tolist(), tokens.tolist(), rows.positions.tolist())
        going = [
            _Sampled(slot, self._followers[slot], token, position)
            for slot, token, position, finish in zip(*columns, finishes, strict=True)
            if slot in self._followers and finish == FinishReason.NONE
        ]
        shares = [going[first :: self._threads] for first in range(min(self._threads, len(going)))]
        # All steps before any mask: they are short, and the next iteration begins with them.
        steps = [self._fillers.submit(_step, share) for share in shares]
        for share, stepped in zip(shares, steps, strict=True):
            filled = self._fillers.submit(_fill, share, stepped)
            for one in share:
                one.follower.ready = filled
                self._stepping[one.slot] = (one.follower, stepped)

    def _enter(self, sequence: EnteringSequence, grammar: Grammar, rules: StopRules) -> None:
        follower = Follower(self._words, rules, jumps=sequence.params.jumps)
        self._followers[sequence.slot] = follower
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


def _succeeded(future: Future[None]) -> bool:
    return future.done() and future.exception() is None


def _step(share: Sequence[_Sampled]) -> None:
    for one in share:
        if one.follower.matcher is not None:
            one.follower.step(one.token, one.position)


def _fill(share: Sequence[_Sampled], stepped: Future[None]) -> None:
    stepped.result()
    for one in share:
        if one.follower.matcher is not None:
            one.follower.fill()

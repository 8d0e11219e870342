"""Requests at random, and what each of them must say, whoever dies meanwhile."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from services.gateway.collector import Choice
from services.gateway.flight import Flight
from services.gateway.flights import Flights
from services.gateway.request import GenerationRequest
from services.gateway.tokens import Token, read_tokens
from shared.messages import Prompt
from shared.sampling import Grammar, GrammarKind, SamplingParams
from shared.types import FinishReason, Int32s, int32s
from tests.recovery.telling_executor import embedding_of, rank_of
from tests.services.scheduler.strict_executor import finish_of, token_of

STOP_LENGTH = 3  # characters
JUMPING = Grammar(GrammarKind.REGEX, ".*")  # the strict executor's words fit any


@dataclass
class Case:
    """A request, and its answer."""

    request: GenerationRequest
    flight: Flight
    expected: list[Expected]  # by choice
    aborted: bool = False

    @property
    def ended(self) -> bool:
        return all(choice.finished for choice in self.flight.collector.choices)

    def check(self) -> None:
        collector = self.flight.collector
        assert collector.failure is None
        for choice, expected in zip(collector.choices, self.expected, strict=True):
            expected.check(choice)


@dataclass
class Expected:
    """One choice."""

    prompt: Int32s
    params: SamplingParams
    text: str
    reason: FinishReason
    tokens: list[int]

    def check(self, choice: Choice) -> None:
        assert choice.finished is not None
        assert "".join(choice.waiting) == self.text
        assert choice.finished.reason is self.reason
        assert choice.finished.completion_tokens == len(self.tokens)
        assert choice.prompt_tokens == len(self.prompt)
        assert choice.finished.embedding == (
            embedding_of(self.prompt) if self.params.embed else b""
        )
        self._check_told(read_tokens(choice.waiting_spans))

    def _check_told(self, told: list[Token]) -> None:
        params, prompt = self.params, len(self.prompt)
        first = 0 if params.return_token_ids or params.prompt_logprobs is not None else prompt
        if not params.wants_tokens:
            assert told == []
            return
        ids = [*self.prompt, *self.tokens]
        assert [token.position for token in told] == list(range(first, len(ids)))
        assert [token.id for token in told] == ids[first:]
        for token in told:
            asked = params.prompt_logprobs if token.position < prompt else params.logprobs
            rank = 0 if asked is None or not token.position else rank_of(params, token.position)
            assert (token.rank, token.logprob) == (rank, -rank if rank else None)


def ask(rng: random.Random, flights: Flights, library: Tokenizer, *, may_stop: bool = True) -> Case:
    """Of a few beginnings, so that many are found in the cache."""
    first = rng.choice([0, 0, 100])
    prompt = int32s(range(first, first + rng.randint(1, 12)))
    params, samples = _params(rng), rng.choice([1, 1, 1, 2, 3])
    if may_stop and not params.echo and rng.random() < 0.3:
        text = _answer(prompt, params, library).text
        if (stop := _stop(rng, text)) is not None:
            params = replace(params, stop=[stop])
    request = GenerationRequest("m", [Prompt(token_ids=prompt)], samples, params, stream=True)
    expected = [_answer(prompt, request.params_of(n), library) for n in range(samples)]
    return Case(request, flights.start(request, time.perf_counter()), expected)


def _params(rng: random.Random) -> SamplingParams:
    params = SamplingParams(
        seed=rng.randint(0, 1000),
        max_tokens=rng.randint(0, 24),
        ignore_eos=rng.random() < 0.5,
        return_token_ids=rng.random() < 0.2,
        logprobs=rng.choice([None, None, None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
        echo=rng.random() < 0.2,
        grammar=JUMPING if rng.random() < 0.3 else None,
    )
    embedding = SamplingParams(seed=params.seed, max_tokens=0, embed=True)
    return embedding if rng.random() < 0.1 else params


def _stop(rng: random.Random, text: str) -> str | None:
    """Something of a text, of whole characters only."""
    begin = rng.randint(0, max(0, len(text) - STOP_LENGTH))
    stop = text[begin : begin + STOP_LENGTH]
    return None if len(stop) < STOP_LENGTH or "\ufffd" in stop else stop


def _answer(prompt: Int32s, params: SamplingParams, library: Tokenizer) -> Expected:
    """Undisturbed."""
    tokens, reason = _tokens(params, len(prompt))
    shown = tokens[:-1] if reason is FinishReason.STOP else tokens  # an end id has no text
    before = list(prompt) if params.echo else []
    text = library.decode(before + shown)
    for stop in params.stop:
        if (place := text.find(stop)) >= 0:
            counts = range(1, len(shown) + 1)
            needed = next(n for n in counts if stop in library.decode(shown[:n]))
            return Expected(prompt, params, text[:place], FinishReason.STOP, tokens[:needed])
    return Expected(prompt, params, text, reason, tokens)


def _tokens(params: SamplingParams, prompt: int) -> tuple[list[int], FinishReason]:
    """Those that count, and what ends them."""
    tokens: list[int] = []
    while True:
        position = prompt + len(tokens)
        finish = finish_of(params, prompt, position)
        if params.hidden_tokens:
            return [], finish
        tokens.append(token_of(params, position))
        if finish:
            return tokens, finish

"""What the mesh said of one HTTP request and its client has not been sent yet.

The mesh's side writes and never waits; the client's side takes all that has gathered since it
last looked, so a client that lags gets fewer and longer pieces, and holds up nobody.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http import HTTPStatus

from services.gateway.errors import fault, of_failure
from services.gateway.tokens import Span, Token, read_tokens
from shared.messages import Failure, Finished, TokenDetails
from shared.types import FinishReason

MAX_LAG_CHARS = 1_000_000  # a stream whose client is further behind is given up


@dataclass(slots=True)
class Choice:
    """One sequence's answer so far.

    [0, taken)         characters handed to the client's side
    [taken, received)  characters in `waiting`
    """

    accepted: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    completion_tokens: int = 0
    received: int = 0
    waiting: list[str] = field(default_factory=list)
    told: bool = False  # of any token
    known_tokens: int = 0  # the position of the next one to be told of
    waiting_spans: list[Span] = field(default_factory=list)
    finished: Finished | None = None
    ended: bool = False  # its last change was taken


@dataclass(frozen=True, slots=True)
class Change:
    """New text of one choice, its tokens if they were asked for, and how it ended if it did."""

    index: int
    text: str
    finished: Finished | None
    spans: list[Span] = field(default_factory=list)

    @property
    def tokens(self) -> list[Token]:
        return read_tokens(self.spans)


class Collector:
    """`max_lag` None: the client's side keeps all of it anyway, so there is no lag to bound."""

    def __init__(self, size: int, max_lag: int | None = MAX_LAG_CHARS) -> None:
        self.choices = [Choice() for _ in range(size)]
        self.failure: Failure | None = None
        self.too_slow = False  # the client
        self._max_lag = max_lag
        self._lag = 0
        self._woken = False
        self._news = asyncio.Event()

    # --- the mesh's side

    def accept(self, index: int, prompt_tokens: int) -> None:
        choice = self.choices[index]
        choice.accepted = True
        choice.prompt_tokens = prompt_tokens
        self._news.set()

    def found(self, index: int, cached_tokens: int) -> None:
        """So much of the prompt did not need to be computed."""
        self.choices[index].cached_tokens = cached_tokens

    def add(self, index: int, offset: int, text: str, completion_tokens: int) -> None:
        """Text that begins `offset` characters into the answer; what is known of it is skipped."""
        choice = self.choices[index]
        if self.failure or choice.finished:
            return
        known = choice.received - offset
        if known < 0:
            self.fail(fault("A part of the answer was lost."))
            return
        choice.completion_tokens = max(choice.completion_tokens, completion_tokens)
        text = text[known:] if known else text
        if text:
            choice.waiting.append(text)
            choice.received += len(text)
            self._add_lag(len(text))
            self._news.set()

    def tell(self, index: int, details: TokenDetails) -> None:
        """Tokens from a position of the sequence on; those known already are skipped."""
        choice = self.choices[index]
        if self.failure or choice.finished:
            return
        if not choice.told:
            choice.known_tokens = details.position
            choice.told = True
        known = choice.known_tokens - details.position
        if known < 0:
            self.fail(fault("Some tokens of the answer were lost."))
            return
        new = len(details.token_ids) - known
        if new > 0:
            choice.waiting_spans.append(Span(details, known))
            choice.known_tokens += new
            self._add_lag(sum(map(len, details.pieces[known:])))
            self._news.set()

    def finish(self, index: int, finished: Finished) -> None:
        choice = self.choices[index]
        if self.failure or choice.finished:
            return
        if finished.failure is not None:
            self.fail(finished.failure)
        elif finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.fail(fault("The server gave up this request."))
        else:
            choice.completion_tokens = finished.completion_tokens
            choice.finished = finished
            self._news.set()

    def fail(self, failure: Failure) -> None:
        """End the request with an error; the first one counts."""
        if self.failure is None:
            self.failure = failure
            self._news.set()

    # --- the client's side

    async def opened(self) -> None:
        """Wait until all choices are in the mesh's hands; raises ApiError."""
        while not all(choice.accepted or choice.received for choice in self.choices):
            self._raise_failure()
            await self._wait()
        self._raise_failure()

    async def changes(self) -> list[Change]:
        """All that is new, waiting for something; [] at the end, or if woken; raises ApiError."""
        while not (found := self._take()):
            self._raise_failure()
            if self.complete or self._woken:
                break
            await self._wait()
        self._woken = False
        return found

    @property
    def complete(self) -> bool:
        """Whether all of every choice was taken."""
        return all(choice.ended for choice in self.choices)

    def wake(self) -> None:
        """Let `changes` return, with nothing if there is nothing."""
        self._woken = True
        self._news.set()

    def _take(self) -> list[Change]:
        found = []
        for index, choice in enumerate(self.choices):
            ends = choice.finished is not None and not choice.ended
            if choice.waiting or choice.waiting_spans or ends:
                text, spans = "".join(choice.waiting), choice.waiting_spans
                found.append(Change(index, text, choice.finished, spans))
                choice.waiting.clear()
                choice.waiting_spans = []
                choice.ended = choice.finished is not None
        self._lag = 0
        return found

    def _add_lag(self, chars: int) -> None:
        self._lag += chars
        if self._max_lag is not None and self._lag > self._max_lag:
            self.too_slow = True
            for choice in self.choices:
                choice.waiting.clear()
                choice.waiting_spans.clear()
            message = f"The client is more than {self._max_lag} characters behind."
            self.fail(Failure(HTTPStatus.REQUEST_TIMEOUT, message, code="client_too_slow"))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise of_failure(self.failure)

    async def _wait(self) -> None:
        await self._news.wait()
        self._news.clear()

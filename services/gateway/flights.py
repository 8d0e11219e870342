"""Sequences in flight: sent into the mesh, followed, sent again, aborted, and ended.

What happens to them when a service is lost is decided here and nowhere else.
"""

from __future__ import annotations

import asyncio
import time

from services.gateway.collector import MAX_LAG_CHARS, Collector
from services.gateway.errors import fault, unavailable_failure
from services.gateway.flight import Flight, Link, Sequence, Stage, new_request_id
from services.gateway.metrics import GatewayMetrics
from services.gateway.request import GenerationRequest
from services.gateway.routing import Outstanding, detokenizer_of, work_of
from shared.messages import (
    Abort,
    Accepted,
    Admitted,
    Deltas,
    Failure,
    Finished,
    Generate,
    Refused,
    Route,
)
from shared.types import FinishReason, RequestId, ServiceName

TOKENIZER_WAIT_SECONDS = 5.0  # for another one to come, before the request fails
MAX_LAUNCHES = 3  # a prompt that kills tokenizers is not sent to all of them


class Flights:
    def __init__(
        self, gateway: str, link: Link, outstanding: Outstanding, metrics: GatewayMetrics
    ) -> None:
        self._gateway = gateway
        self._link = link
        self._outstanding = outstanding
        self._metrics = metrics
        self._sequences: dict[RequestId, Sequence] = {}
        self._last_token_at: float | None = None  # perf_counter, seconds

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def seconds_since_last_token(self) -> float | None:
        at = self._last_token_at
        return None if at is None else time.perf_counter() - at

    # --- the HTTP side

    def start(self, request: GenerationRequest, arrived: float, *, measured: bool = True) -> Flight:
        """Send all of a request on its way."""
        collector = Collector(request.size, MAX_LAG_CHARS if request.stream else None)
        flight = Flight(request, collector, arrived, measured)
        for place, prompt in enumerate(request.prompts):
            first, *others = [
                Sequence(
                    flight, place * request.samples + sample, prompt, request.params_of(sample)
                )
                for sample in range(request.samples)
            ]
            first.followers = others
            flight.sequences += [first, *others]
        self._sequences |= {one.request_id: one for one in flight.sequences}
        for sequence in flight.sequences[:: request.samples]:
            self._launch(sequence)
        return flight

    def close(self, flight: Flight, reason: str) -> None:
        """Abort what has not ended; nothing that comes later is for this request."""
        for sequence in flight.sequences:
            if sequence.request_id in self._sequences:
                self._abort(sequence, reason)
                if flight.measured:
                    self._metrics.ended(FinishReason.ABORT)

    def end_all(self, failure: Failure) -> None:
        """Fail every request that is still going on."""
        for flight in {sequence.flight for sequence in self._sequences.values()}:
            flight.collector.fail(failure)
            self._close_failed(flight)

    # --- messages

    def accepted(self, message: Accepted) -> None:
        sequence = self._known(message.request_id)
        if sequence is None:
            return
        if sequence.stage is Stage.SENT:
            self._outstanding.done(sequence.tokenizer, work_of(sequence.prompt))
        sequence.stage = Stage.ACCEPTED
        if sequence.flight.accepted_at is None:
            sequence.flight.accepted_at = time.perf_counter()
        sequence.scheduler = message.scheduler
        sequence.flight.collector.accept(sequence.index, message.prompt_tokens)
        for follower in sequence.followers:
            self._launch(follower)
        sequence.followers = []

    def admitted(self, message: Admitted) -> None:
        sequence = self._known(message.request_id)
        if sequence is not None:
            if sequence.flight.admitted_at is None:
                sequence.flight.admitted_at = time.perf_counter()
            sequence.flight.collector.found(sequence.index, message.cached_tokens)

    def refused(self, message: Refused) -> None:
        sequence = self._known(message.request_id)
        if sequence is not None:
            self._fail(sequence, message.failure)

    def deltas(self, message: Deltas) -> None:
        now = self._last_token_at = time.perf_counter()
        columns = (message.request_ids, message.texts, message.offsets, message.token_counts)
        for request_id, text, offset, tokens in zip(*columns, strict=False):
            sequence = self._known(request_id)
            if sequence is not None:
                self._measure_tokens(sequence, tokens, now)
                sequence.flight.collector.add(sequence.index, offset, text, tokens)
                self._close_failed(sequence.flight)
        for details in message.details:
            sequence = self._known(details.request_id)
            if sequence is not None:
                sequence.flight.collector.tell(sequence.index, details)
                self._close_failed(sequence.flight)
        for finished in message.finished:
            sequence = self._known(finished.request_id)
            if sequence is not None:
                self._end(sequence, finished, now)

    # --- peers

    def tokenizer_joined(self) -> None:
        for sequence in list(self._sequences.values()):
            if sequence.stage is Stage.WAITING:
                self._launch(sequence)

    def lost(self, service: ServiceName, name: str) -> None:
        """Launch again what no text was heard of; end the rest of what went through this peer."""
        if service is ServiceName.TOKENIZER:
            self._outstanding.forget(name)
        for sequence in list(self._sequences.values()):
            if sequence.request_id not in self._sequences:
                continue  # went with another of its request
            if sequence.stage is Stage.SENT and self._may_be_at(sequence, service, name):
                self._abort(sequence, f"{service} lost")
                self._relaunch(sequence)
            elif sequence.stage is Stage.ACCEPTED and name in (
                sequence.scheduler,
                sequence.detokenizer,
            ):
                failure = unavailable_failure(f"The {service} of this request was lost.")
                sequence.flight.collector.fail(failure)
                self._close_failed(sequence.flight)

    def _may_be_at(self, sequence: Sequence, service: ServiceName, name: str) -> bool:
        if service is ServiceName.SCHEDULER:  # the tokenizer chose it, and has not told us
            return True
        return name in (sequence.tokenizer, sequence.detokenizer)

    # --- one sequence

    def _launch(self, sequence: Sequence) -> None:
        if sequence.request_id not in self._sequences:
            return  # went with another of its request
        detokenizer = detokenizer_of(sequence.request_id, self._link.peers(ServiceName.DETOKENIZER))
        if detokenizer is None or not self._link.peers(ServiceName.SCHEDULER):
            self._fail(sequence, unavailable_failure("A service of the mesh is missing."))
            return
        request = sequence.flight.request
        message = Generate(
            sequence.request_id,
            sequence.prompt,
            sequence.params,
            Route(self._gateway, detokenizer),
            tenant=request.tenant,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        sequence.detokenizer = detokenizer
        work = work_of(sequence.prompt)
        tokenizers = list(self._link.peers(ServiceName.TOKENIZER))
        while (tokenizer := self._outstanding.choose(tokenizers)) is not None:
            if self._link.send(ServiceName.TOKENIZER, tokenizer, message):
                self._outstanding.add(tokenizer, work)
                sequence.tokenizer, sequence.stage = tokenizer, Stage.SENT
                sequence.launches += 1
                return
            tokenizers.remove(tokenizer)
        sequence.stage = Stage.WAITING
        loop = asyncio.get_running_loop()
        loop.call_later(TOKENIZER_WAIT_SECONDS, self._give_up_waiting, sequence)

    def _relaunch(self, sequence: Sequence) -> None:
        sequence.flight.collector.found(sequence.index, 0)
        sequence.request_id = new_request_id()
        self._sequences[sequence.request_id] = sequence
        if sequence.launches >= MAX_LAUNCHES:
            sequence.stage = Stage.HELD
            message = f"This request was lost {sequence.launches} times with a service."
            self._fail(sequence, fault(message))
        else:
            self._launch(sequence)

    def _give_up_waiting(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.WAITING and sequence.request_id in self._sequences:
            self._fail(sequence, unavailable_failure("No tokenizer is connected."))

    def _fail(self, sequence: Sequence, failure: Failure) -> None:
        self._forget(sequence)
        sequence.flight.collector.fail(failure)
        self._close_failed(sequence.flight)

    def _close_failed(self, flight: Flight) -> None:
        """Not left to the client's side, which may be waiting for its client."""
        if flight.collector.failure is not None:
            self.close(flight, "client too slow" if flight.collector.too_slow else "server")

    def _end(self, sequence: Sequence, finished: Finished, now: float) -> None:
        self._forget(sequence)
        sequence.flight.collector.finish(sequence.index, finished)
        if sequence.flight.measured:
            self._metrics.ended(finished.reason)
            self._metrics.latency.observe(now - sequence.flight.arrived)
        self._close_failed(sequence.flight)

    def _abort(self, sequence: Sequence, reason: str) -> None:
        """Tell everyone who may know of this launch."""
        abort = Abort(sequence.request_id, reason)
        if sequence.stage is Stage.SENT:
            self._link.send(ServiceName.TOKENIZER, sequence.tokenizer, abort)
            for scheduler in self._link.peers(ServiceName.SCHEDULER):
                self._link.send(ServiceName.SCHEDULER, scheduler, abort)
        elif sequence.stage is Stage.ACCEPTED:
            self._link.send(ServiceName.SCHEDULER, sequence.scheduler, abort)
        if sequence.stage >= Stage.SENT:
            self._link.send(ServiceName.DETOKENIZER, sequence.detokenizer, abort)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if sequence.stage is Stage.SENT:
            self._outstanding.done(sequence.tokenizer, work_of(sequence.prompt))

    def _known(self, request_id: RequestId) -> Sequence | None:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            self._metrics.late.inc()
        return sequence

    def _measure_tokens(self, sequence: Sequence, tokens: int, now: float) -> None:
        new = tokens - sequence.tokens
        if new <= 0:
            return
        if sequence.flight.measured:
            if sequence.tokens:
                self._metrics.between_tokens.observe((now - sequence.last_token_at) / new)
            else:
                self._metrics.first_token.observe(now - sequence.flight.arrived)
        if sequence.flight.first_token_at is None:
            sequence.flight.first_token_at = now
        sequence.tokens, sequence.last_token_at = tokens, now

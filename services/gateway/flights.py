"""Sequences in flight: sent into the mesh, followed, sent again, aborted, and ended.

What happens to them when a service is lost is decided here and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from services.gateway.collector import MAX_LAG_CHARS, Collector
from services.gateway.errors import fault
from services.gateway.flight import Flight, Link, Sequence, Stage, new_request_id
from services.gateway.launches import Launches
from services.gateway.metrics import GatewayMetrics
from services.gateway.request import GenerationRequest
from services.gateway.routing import Outstanding
from shared.messages import (
    Abort,
    Accepted,
    Admitted,
    Deltas,
    Failure,
    Finished,
    Gone,
    Refused,
    Reopen,
)
from shared.metrics import total
from shared.types import FinishReason, RequestId, ServiceName

HEARSAY_SECONDS = 1.0  # until all have heard of a loss that we heard of
PATIENCE_SECONDS = 65.0  # until others go on with a request: a little longer than theirs
MAX_TOKENIZERS_LOST = 3  # a prompt that kills tokenizers is not sent to all of them


class Flights:
    def __init__(
        self, gateway: str, link: Link, outstanding: Outstanding, metrics: GatewayMetrics
    ) -> None:
        self._link = link
        self._launches = Launches(gateway, link, outstanding, self._fail)
        self._outstanding = outstanding
        self._metrics = metrics
        self._log = structlog.get_logger("gateway")
        self._sequences: dict[RequestId, Sequence] = {}
        self._last_token_at: float | None = None  # perf_counter, seconds

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def seconds_since_last_token(self) -> float | None:
        at = self._last_token_at
        return None if at is None else time.perf_counter() - at

    @property
    def load(self) -> Mapping[str, float]:
        return {
            "running": len(self) - self._launches.num_waiting,
            "waiting": self._launches.num_waiting,
            "recoveries": total(self._metrics.recoveries),
        }

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
            self._launches.launch(sequence)
        return flight

    def close(self, flight: Flight, reason: str) -> None:
        """Abort what has not ended; nothing that comes later is for this request."""
        for sequence in flight.sequences:
            if sequence.request_id in self._sequences:
                self._drop(sequence, reason)
                if flight.measured:
                    self._metrics.ended(FinishReason.ABORT)

    def end_all(self, failure: Failure) -> None:
        """Fail every request that is still going on."""
        for flight in {sequence.flight for sequence in self._sequences.values()}:
            flight.collector.fail(failure)
            self._close_failed(flight)

    # --- messages

    def accepted(self, message: Accepted, detokenizer: str) -> None:
        """It comes again whenever others have gone on with a request."""
        sequence = self._known(message.request_id)
        if sequence is None:  # an abort may have missed whoever has it now
            self._launches.disown(
                message.request_id, "not wanted any more", message.scheduler, detokenizer
            )
            return
        former = "" if ServiceName.DETOKENIZER in sequence.lost else sequence.detokenizer
        if sequence.stage is Stage.ACCEPTED and former not in ("", detokenizer):
            abort = Abort(sequence.request_id, "another has it")
            self._link.send(ServiceName.DETOKENIZER, former, abort)
        self._found(sequence)
        self._launches.arrived(sequence)
        sequence.stage, sequence.tokenizers_lost = Stage.ACCEPTED, 0
        if sequence.flight.accepted_at is None:
            sequence.flight.accepted_at = time.perf_counter()
        sequence.scheduler, sequence.detokenizer = message.scheduler, detokenizer
        if detokenizer not in self._link.present(ServiceName.DETOKENIZER):
            loop = asyncio.get_running_loop()
            sequence.patience = loop.call_later(HEARSAY_SECONDS, self._doubt, sequence)
        sequence.flight.collector.accept(sequence.index, message.prompt_tokens)
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            if follower.request_id in self._sequences:  # else gone with another of its request
                self._launches.launch(follower)

    def gone(self, message: Gone) -> None:
        """The scheduler has not got what its detokenizer was lost of: it had just ended there."""
        sequence = self._known(message.request_id)
        if sequence is not None and sequence.lost:
            self._relaunch(sequence)

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

    def deltas(self, message: Deltas, detokenizer: str) -> None:
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
            outdated = sequence is not None and sequence.detokenizer != detokenizer
            if sequence is not None and not (outdated and finished.failure):
                self._end(sequence, finished, now)

    # --- peers

    def joined(self, service: ServiceName, name: str) -> None:
        self._launches.joined(service, name)

    def lost(self, service: ServiceName, name: str) -> None:
        """Launch again what nobody else goes on with."""
        self._launches.lost(service, name)
        if service is ServiceName.TOKENIZER:
            self._outstanding.forget(name)
        elif service is ServiceName.SCHEDULER:
            loop = asyncio.get_running_loop()
            loop.call_later(2 * HEARSAY_SECONDS, self._resend, loop.time() + HEARSAY_SECONDS)
        again = waiting = 0
        for sequence in list(self._sequences.values()):
            if sequence.request_id not in self._sequences:
                continue  # went with another of its request
            if sequence.stage is Stage.SENT and self._may_be_at(sequence, service, name):
                sequence.tokenizers_lost += service is ServiceName.TOKENIZER
                self._relaunch(sequence)
                again += 1
            elif sequence.stage is Stage.ACCEPTED and sequence.at(service) == name:
                self._bereave(sequence, service, name)
                again += sequence.stage is not Stage.ACCEPTED
                waiting += sequence.stage is Stage.ACCEPTED
        if again or waiting:
            self._log.warning(
                "a service was lost, its requests go on elsewhere",
                service=str(service),
                name=name,
                launched_again=again,
                handed_on=waiting,
            )
        if again:
            self._metrics.recoveries.labels(service).inc()

    def _resend(self, before: float) -> None:
        """What a tokenizer may have sent to a lost scheduler because it heard of that after us."""
        for sequence in list(self._sequences.values()):
            known = sequence.request_id in self._sequences
            if known and sequence.stage is Stage.SENT and sequence.sent_at < before:
                self._relaunch(sequence)

    def _doubt(self, sequence: Sequence) -> None:
        """Its detokenizer may have died before we heard that it has it."""
        sequence.patience = None
        self._bereave(sequence, ServiceName.DETOKENIZER, sequence.detokenizer)

    def _may_be_at(self, sequence: Sequence, service: ServiceName, name: str) -> bool:
        if service is ServiceName.SCHEDULER:  # the tokenizer chose it, and has not told us
            return True
        return name in (sequence.tokenizer, sequence.detokenizer)

    def _bereave(self, sequence: Sequence, service: ServiceName, name: str) -> None:
        """One of the two that have it is lost: the other one hands it on. Of both, nobody does."""
        sequence.lost.add(service)
        if service is ServiceName.DETOKENIZER:
            reopen = Reopen(sequence.request_id, name)
            if not self._link.send(ServiceName.SCHEDULER, sequence.scheduler, reopen):
                sequence.lost.add(ServiceName.SCHEDULER)
        if len(sequence.lost) > 1:
            self._relaunch(sequence)
        elif sequence.patience is None:
            loop = asyncio.get_running_loop()
            sequence.patience = loop.call_later(PATIENCE_SECONDS, self._relaunch, sequence)

    def _found(self, sequence: Sequence) -> None:
        """It is in somebody's hands again, or needs nobody any more."""
        sequence.lost.clear()
        if sequence.patience is not None:
            sequence.patience.cancel()
            sequence.patience = None

    # --- one sequence

    def _relaunch(self, sequence: Sequence) -> None:
        """From the start, with the same seed: what its client has already is known here."""
        self._drop(sequence, "lost with a service")
        sequence.flight.collector.found(sequence.index, 0)
        sequence.request_id, sequence.stage = new_request_id(), Stage.HELD
        self._sequences[sequence.request_id] = sequence
        if sequence.tokenizers_lost >= MAX_TOKENIZERS_LOST:
            message = f"This request was lost {MAX_TOKENIZERS_LOST} times with a tokenizer."
            self._fail(sequence, fault(message))
        else:
            self._launches.launch(sequence)

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

    def _drop(self, sequence: Sequence, reason: str) -> None:
        """Have the mesh forget this launch."""
        self._launches.abort(sequence, reason)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._launches.withdraw(sequence)
        self._found(sequence)

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

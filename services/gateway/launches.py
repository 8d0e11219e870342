"""Sending sequences into the mesh: a launch waits while a service that it needs is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.errors import unavailable_failure
from services.gateway.flight import Link, Sequence, Stage
from services.gateway.routing import Outstanding, detokenizer_of, work_of
from shared.messages import Abort, Failure, Generate, Route
from shared.types import RequestId, ServiceName
from shared.undelivered import Undelivered

NEEDED = (ServiceName.TOKENIZER, ServiceName.SCHEDULER, ServiceName.DETOKENIZER)
WAIT_SECONDS = 30.0  # for a missing service to come back, before the request fails


class Launches:
    """Each launch of a sequence has a new request id; what it needs is one of each service."""

    def __init__(
        self,
        gateway: str,
        link: Link,
        outstanding: Outstanding,
        fail: Callable[[Sequence, Failure], None],
    ) -> None:
        self._gateway = gateway
        self._link = link
        self._outstanding = outstanding
        self._fail = fail  # what waited too long
        self._waiting: dict[Sequence, asyncio.TimerHandle | None] = {}
        self._undelivered = Undelivered()  # to instances that we are not linked to yet

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a service that is missing."""
        return len(self._waiting)

    def launch(self, sequence: Sequence) -> None:
        """Send it to the tokenizer with the least to do, now or when that is possible."""
        if not self._send(sequence) and sequence not in self._waiting:
            sequence.stage = Stage.WAITING
            self._waiting[sequence] = None
            self._lose_patience()

    def joined(self, service: ServiceName, name: str) -> None:
        for message in self._undelivered.claim(service, name):
            self._link.send(service, name, message)
        for sequence in list(self._waiting):
            if self._send(sequence):
                self._wait_no_more(sequence)

    def lost(self, service: ServiceName, name: str) -> None:
        self._undelivered.claim(service, name)
        self._lose_patience()

    def withdraw(self, sequence: Sequence) -> None:
        """It has ended, or is to be launched anew: it waits no more, and is nobody's work."""
        self._wait_no_more(sequence)
        self.arrived(sequence)

    def arrived(self, sequence: Sequence) -> None:
        """Its tokenizer is done with it."""
        if sequence.stage is Stage.SENT:
            self._outstanding.done(sequence.tokenizer, work_of(sequence.prompt))

    def abort(self, sequence: Sequence, reason: str) -> None:
        """Tell everyone who may know of this launch."""
        abort = Abort(sequence.request_id, reason)
        if sequence.stage is Stage.SENT:
            self._link.send(ServiceName.TOKENIZER, sequence.tokenizer, abort)
            self._tell_all(ServiceName.SCHEDULER, abort)  # the tokenizer chose one
            self._link.send(ServiceName.DETOKENIZER, sequence.detokenizer, abort)
        elif sequence.stage is Stage.ACCEPTED and sequence.lost:  # on its way to somebody
            self._tell_all(ServiceName.SCHEDULER, abort)
            self._tell_all(ServiceName.DETOKENIZER, abort)
        elif sequence.stage is Stage.ACCEPTED:
            self.disown(sequence.request_id, reason, sequence.scheduler, sequence.detokenizer)

    def disown(self, request_id: RequestId, reason: str, scheduler: str, detokenizer: str) -> None:
        """Have these two drop a request."""
        abort = Abort(request_id, reason)
        owners = ((ServiceName.SCHEDULER, scheduler), (ServiceName.DETOKENIZER, detokenizer))
        for service, name in owners:
            if not self._link.send(service, name, abort):
                self._undelivered.keep(service, name, abort)

    def _tell_all(self, service: ServiceName, abort: Abort) -> None:
        for name in self._link.present(service):
            self._link.send(service, name, abort)

    def _send(self, sequence: Sequence) -> bool:
        """Whether all that it needs is there, and a tokenizer has it."""
        detokenizer = detokenizer_of(sequence.request_id, self._link.peers(ServiceName.DETOKENIZER))
        if detokenizer is None or not self._link.peers(ServiceName.SCHEDULER):
            return False
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
        tokenizers = list(self._link.peers(ServiceName.TOKENIZER))
        while (tokenizer := self._outstanding.choose(tokenizers)) is not None:
            if self._link.send(ServiceName.TOKENIZER, tokenizer, message):
                self._outstanding.add(tokenizer, work_of(sequence.prompt))
                sequence.tokenizer, sequence.detokenizer = tokenizer, detokenizer
                sequence.stage, sequence.sent_at = Stage.SENT, asyncio.get_running_loop().time()
                return True
            tokenizers.remove(tokenizer)
        return False

    def _lose_patience(self) -> None:
        """From when a service is missing; one that only leaves has to end first."""
        if all(self._link.present(service) for service in NEEDED):
            return
        loop = asyncio.get_running_loop()
        for sequence, timer in self._waiting.items():
            if timer is None:
                self._waiting[sequence] = loop.call_later(WAIT_SECONDS, self._give_up, sequence)

    def _wait_no_more(self, sequence: Sequence) -> None:
        if (timer := self._waiting.pop(sequence, None)) is not None:
            timer.cancel()

    def _give_up(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        self._fail(sequence, unavailable_failure("A service of the mesh is missing."))

"""The detokenizer without sockets: messages in, messages out."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.detokenizer.decoder import Decoders
from services.detokenizer.deltas import DeltaColumns
from services.detokenizer.early import EarlyTokens, Row
from services.detokenizer.journal import Journal
from shared.codec import Identity
from shared.messages import (
    Abort,
    Accepted,
    Failed,
    Failure,
    Finished,
    Message,
    Open,
    StepResult,
)
from shared.tombstones import Tombstones
from shared.types import FinishReason, Handle, Incarnation, RequestId, ServiceName

SCHEDULER_LOST = Failure(503, "The scheduler of this request was lost.", code="service_unavailable")
TOKENS_LOST = Failure(500, "Some tokens of this request were lost.", code="internal_error")

Outgoing = tuple[ServiceName, str, Message]  # to the instance of this name


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    tokens: int = 0  # that became part of a journal
    late_tokens: int = 0  # of requests that had ended
    repeated_tokens: int = 0  # computed again after a loss
    dropped_early_tokens: int = 0  # for which no `Open` came in time


@dataclass(slots=True)
class SchedulerLife:
    """The requests of one incarnation of a scheduler."""

    name: str
    last_handle: Handle = Handle(0)
    journals: dict[int, Journal] = field(default_factory=dict)  # by handle


class Outbox:
    """What one incoming message leads to: a `Deltas` for each gateway, and single messages."""

    def __init__(self) -> None:
        self._first: list[Outgoing] = []
        self._deltas: dict[str, DeltaColumns] = {}
        self._last: list[Outgoing] = []

    def accept(self, journal: Journal) -> None:
        accepted = Accepted(journal.request_id, len(journal.prompt), journal.scheduler.name)
        self._first.append((ServiceName.GATEWAY, journal.gateway, accepted))

    def deltas(self, gateway: str) -> DeltaColumns:
        columns = self._deltas.get(gateway)
        if columns is None:
            columns = self._deltas[gateway] = DeltaColumns()
        return columns

    def abort(self, journal: Journal, reason: str) -> None:
        abort = Abort(journal.request_id, reason)
        self._last.append((ServiceName.SCHEDULER, journal.scheduler.name, abort))

    def messages(self) -> list[Outgoing]:
        deltas = [
            (ServiceName.GATEWAY, gateway, columns.message())
            for gateway, columns in self._deltas.items()
        ]
        return [*self._first, *deltas, *self._last]


class DetokenizerCore:
    """All journals of this shard, and who may still say something about them."""

    def __init__(self, decoders: Decoders, eos_token_ids: frozenset[int]) -> None:
        self.counters = Counters()
        self._decoders = decoders
        self._eos_token_ids = eos_token_ids
        self._journals: dict[RequestId, Journal] = {}
        self._lives: dict[Incarnation, SchedulerLife] = {}
        self._early_tokens = EarlyTokens()
        self._tombstones = Tombstones()

    @property
    def num_open(self) -> int:
        return len(self._journals)

    def open(self, opened: Open, scheduler: Identity) -> list[Outgoing]:
        """Begin a journal, with what came before its time."""
        outbox = Outbox()
        life = self._life(scheduler, outbox)
        life.last_handle = max(life.last_handle, opened.handle)
        rows = self._early_tokens.claim(scheduler.incarnation, opened.handle)
        if self._tombstones.claim(opened.request_id):
            self.counters.late_tokens += len(rows)
            return outbox.messages()
        if opened.request_id in self._journals:
            self._forget(self._journals[opened.request_id])
        journal = Journal(opened, scheduler, self._decoders, self._eos_token_ids)
        self._journals[opened.request_id] = journal
        life.journals[opened.handle] = journal
        outbox.accept(journal)
        for row in rows:
            if opened.request_id in self._journals:
                self._take(journal, *row, outbox)
            else:  # it ended with one of these rows
                self.counters.late_tokens += 1
        return outbox.messages()

    def step(self, result: StepResult) -> list[Outgoing]:
        """Add one iteration's tokens to their journals."""
        outbox = Outbox()
        life = self._lives.get(result.epoch)
        journals = life.journals if life is not None else {}
        for handle, position, token_id, finish in zip(
            result.handles, result.positions, result.token_ids, result.finishes, strict=True
        ):
            journal = journals.get(handle)
            if journal is not None:
                self._take(journal, position, token_id, finish, outbox)
            else:
                self._stray(result.epoch, Handle(handle), Row(position, token_id, finish))
        return outbox.messages()

    def abort(self, request_id: RequestId) -> None:
        """Forget a request; an unknown one is remembered, it may be on its way."""
        journal = self._journals.get(request_id)
        if journal is None:
            self._tombstones.bury(request_id)
        else:
            self._forget(journal)

    def failed(self, message: Failed) -> list[Outgoing]:
        outbox = Outbox()
        journal = self._journals.get(message.request_id)
        if journal is not None:
            self._fail(journal, message.failure, outbox)
        return outbox.messages()

    def scheduler_lost(self, name: str) -> list[Outgoing]:
        """What it had running ends with an error."""
        outbox = Outbox()
        for epoch in [epoch for epoch, life in self._lives.items() if life.name == name]:
            self._end_life(epoch, outbox)
        return outbox.messages()

    def gateway_lost(self, name: str) -> list[Outgoing]:
        """Nobody reads its answers any more."""
        outbox = Outbox()
        for journal in [one for one in self._journals.values() if one.gateway == name]:
            self._forget(journal)
            outbox.abort(journal, "the gateway was lost")
        return outbox.messages()

    def _take(
        self, journal: Journal, position: int, token_id: int, finish: int, outbox: Outbox
    ) -> None:
        if position != journal.next_position:
            self._misplaced(journal, position, outbox)
            return
        self.counters.tokens += 1
        text = journal.take(token_id, finish)
        if text:
            outbox.deltas(journal.gateway).add(journal, text)
        if journal.finished is not None:
            self._forget(journal)
            outbox.deltas(journal.gateway).finish(journal.finished)
            if not finish:  # the executor does not know it yet
                outbox.abort(journal, "a stop string was found")

    def _misplaced(self, journal: Journal, position: int, outbox: Outbox) -> None:
        if position < journal.next_position:
            self.counters.repeated_tokens += 1
        else:
            self._fail(journal, TOKENS_LOST, outbox)
            outbox.abort(journal, "tokens were lost")

    def _stray(self, epoch: Incarnation, handle: Handle, row: Row) -> None:
        life = self._lives.get(epoch)
        if life is not None and handle <= life.last_handle:
            self.counters.late_tokens += 1
        else:
            self.counters.dropped_early_tokens += self._early_tokens.keep(epoch, handle, row)

    def _life(self, scheduler: Identity, outbox: Outbox) -> SchedulerLife:
        life = self._lives.get(scheduler.incarnation)
        if life is None:
            former = [epoch for epoch, one in self._lives.items() if one.name == scheduler.name]
            for epoch in former:
                self._end_life(epoch, outbox)
            life = self._lives[scheduler.incarnation] = SchedulerLife(scheduler.name)
        return life

    def _end_life(self, epoch: Incarnation, outbox: Outbox) -> None:
        for journal in list(self._lives[epoch].journals.values()):
            self._fail(journal, SCHEDULER_LOST, outbox)
        del self._lives[epoch]

    def _fail(self, journal: Journal, failure: Failure, outbox: Outbox) -> None:
        self._forget(journal)
        journal.finished = Finished(
            journal.request_id, FinishReason.ERROR, len(journal.output), failure=failure
        )
        outbox.deltas(journal.gateway).finish(journal.finished)

    def _forget(self, journal: Journal) -> None:
        self._journals.pop(journal.request_id, None)
        self._lives[journal.scheduler.incarnation].journals.pop(journal.handle, None)

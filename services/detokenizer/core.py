"""The detokenizer without sockets: messages in, messages out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from services.detokenizer.decoder import Decoders
from services.detokenizer.details import Entry, entries
from services.detokenizer.early import EarlyTokens, Item, Row, num_tokens
from services.detokenizer.journal import Journal
from services.detokenizer.outbox import Outbox, Outgoing
from shared.codec import Identity
from shared.messages import Embedding, Failed, Failure, Finished, Open, StepResult
from shared.tombstones import Tombstones
from shared.types import FinishReason, Handle, Incarnation, RequestId

SCHEDULER_LOST = Failure(503, "The scheduler of this request was lost.", code="service_unavailable")
TOKENS_LOST = Failure(500, "Some tokens of this request were lost.", code="internal_error")


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
        early = self._early_tokens.claim(scheduler.incarnation, opened.handle)
        if self._tombstones.claim(opened.request_id):
            self.counters.late_tokens += num_tokens(early)
            return outbox.messages()
        if opened.request_id in self._journals:
            self._forget(self._journals[opened.request_id])
        journal = Journal(opened, scheduler, self._decoders, self._eos_token_ids)
        self._journals[opened.request_id] = journal
        life.journals[opened.handle] = journal
        outbox.accept(journal)
        for place, item in enumerate(early):
            if opened.request_id not in self._journals:  # it ended with one of these
                self.counters.late_tokens += num_tokens(early[place:])
                break
            if isinstance(item, Row):
                self._take(journal, *item, outbox)
            else:
                journal.note(item)
        return outbox.messages()

    def step(self, result: StepResult) -> list[Outgoing]:
        """Add one iteration's tokens to their journals."""
        outbox = Outbox()
        life = self._lives.get(result.epoch)
        journals = life.journals if life is not None else {}
        for owner, remark in _remarks(result):
            if (journal := journals.get(owner)) is not None:
                journal.note(remark)
            else:
                self._stray(result.epoch, owner, remark)
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
        if text or journal.teller is not None:
            outbox.deltas(journal.gateway).add(journal, text)
        if journal.finished is not None:
            self._forget(journal)
            outbox.deltas(journal.gateway).finish(journal.finished)
            if not finish:  # the executor does not know it yet
                failure = journal.finished.failure
                outbox.abort(journal, failure.message if failure else "a stop string was found")

    def _misplaced(self, journal: Journal, position: int, outbox: Outbox) -> None:
        if position < journal.next_position:
            self.counters.repeated_tokens += 1
        else:
            self._fail(journal, TOKENS_LOST, outbox)
            outbox.abort(journal, "tokens were lost")

    def _stray(self, epoch: Incarnation, handle: Handle, item: Item) -> None:
        life = self._lives.get(epoch)
        if life is not None and handle <= life.last_handle:
            self.counters.late_tokens += num_tokens([item])
        else:
            self.counters.dropped_early_tokens += self._early_tokens.keep(epoch, handle, item)

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


def _remarks(result: StepResult) -> Iterator[tuple[Handle, Entry | Embedding]]:
    """What comes beside its tokens, and whose it is."""
    embeddings = ((one.handle, one) for one in result.embeddings)
    return chain(entries(result.logprobs) if result.logprobs else (), embeddings)

"""The detokenizer without sockets: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from services.detokenizer.decoder import Decoders
from services.detokenizer.details import Entry, entries
from services.detokenizer.early import EarlyTokens, Item, Row, num_tokens
from services.detokenizer.journal import Journal
from services.detokenizer.outbox import Outbox, Outgoing
from shared.codec import Identity
from shared.messages import (
    Abort,
    Embedding,
    Failed,
    Failure,
    Finished,
    Open,
    Recall,
    Recalled,
    Released,
    StepResult,
)
from shared.tombstones import Tombstones
from shared.types import FinishReason, Handle, Incarnation, Int32s, RequestId

SCHEDULER_LOST = Failure(503, "The scheduler of this request was lost.", code="service_unavailable")


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

    def __init__(
        self, decoders: Decoders, eos_token_ids: frozenset[int], name: str = "detokenizer.0"
    ) -> None:
        """`name` is that of this shard in the mesh."""
        self.counters = Counters()
        self._name = name
        self._orphans: dict[RequestId, Journal] = {}  # whose scheduler is lost
        self._decoders = decoders
        self._eos_token_ids = eos_token_ids
        self._journals: dict[RequestId, Journal] = {}
        self._lives: dict[Incarnation, SchedulerLife] = {}
        self._early_tokens = EarlyTokens()
        self._tombstones = Tombstones()

    @property
    def num_open(self) -> int:
        return len(self._journals)

    @property
    def num_orphans(self) -> int:
        """Requests that wait for a scheduler."""
        return len(self._orphans)

    def open(self, opened: Open, scheduler: Identity) -> list[Outgoing]:
        """Begin a journal, or go on with it under this scheduler, with what came before its time.

        Of a request that ran before, what the scheduler knows of its tokens and we do not is taken
        as if it were new: the gateway tells by the offsets what its client has already.
        """
        outbox = Outbox()
        life = self._life(scheduler)
        life.last_handle = max(life.last_handle, opened.handle)
        early = self._early_tokens.claim(scheduler.incarnation, opened.handle)
        if self._tombstones.claim(opened.request_id):
            self.counters.late_tokens += num_tokens(early)
            outbox.tell(scheduler.name, Abort(opened.request_id, "aborted before"))
            return outbox.messages()
        journal = self._journals.get(opened.request_id)
        if journal is not None and journal.taken_from == scheduler.name:
            outbox.tell(scheduler.name, Released([opened.request_id]))
            return outbox.messages()
        if journal is None:
            journal = Journal(opened, scheduler, self._decoders, self._eos_token_ids)
            self._journals[opened.request_id] = journal
        else:
            former = journal.scheduler
            if former.name != scheduler.name and self._bound(journal):  # it is here twice
                outbox.tell(former.name, Released([opened.request_id]))
            self._unbind(journal)
            journal.scheduler, journal.handle = scheduler, opened.handle
            journal.resubmitted = journal.behind = False
        life.journals[opened.handle] = journal
        outbox.accept(journal)
        self._catch_up(journal, opened.token_ids, outbox)
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
        """Forget a request; an unknown one is remembered, it may be on its way (again)."""
        journal = self._journals.get(request_id)
        if journal is None or journal.resubmitted:
            self._tombstones.bury(request_id)
        if journal is not None:
            self._forget(journal)

    def failed(self, message: Failed) -> list[Outgoing]:
        outbox = Outbox()
        journal = self._journals.get(message.request_id)
        if journal is not None:
            self._fail(journal, message.failure, outbox)
        return outbox.messages()

    def recall(self, recall: Recall, scheduler: Identity) -> list[Outgoing]:
        """It lost an executor, which may have told us more than it, or less."""
        outbox = Outbox()
        spared = set(recall.spared)
        for handle, journal in self._life(scheduler).journals.items():
            if handle not in spared:
                outbox.tell(scheduler.name, journal.submission(self._name))
        outbox.tell(scheduler.name, Recalled(recall.number))
        return outbox.messages()

    def scheduler_lost(self, name: str) -> int:
        """What it had running needs another; returns how much that is."""
        for journal in self._orphans.values():
            if journal.asked == name:
                journal.asked = ""
        before = len(self._orphans)
        for epoch in [epoch for epoch, life in self._lives.items() if life.name == name]:
            self._end_life(epoch)
        return len(self._orphans) - before

    def take_from(self, schedulers: Sequence[str]) -> list[Outgoing]:
        """Others are to go on: these have no executors, or may not be what they were."""
        outbox = Outbox()
        for life in self._lives.values():
            if life.name in schedulers and life.journals:
                ids = [journal.request_id for journal in life.journals.values()]
                outbox.tell(life.name, Released(ids))
                for journal in life.journals.values():
                    journal.taken_from = life.name
                    self._orphans[journal.request_id] = journal
                life.journals.clear()
        return outbox.messages()

    @property
    def schedulers(self) -> set[str]:
        """Those that have requests of ours."""
        return {life.name for life in self._lives.values() if life.journals}

    def resubmit(self, choose: Callable[[Journal], str | None]) -> list[Outgoing]:
        """Ask a scheduler to go on with what has none, once each; `choose` may know of none."""
        outbox = Outbox()
        for journal in self._orphans.values():
            if not journal.asked and (scheduler := choose(journal)) is not None:
                journal.asked = scheduler
                if journal.taken_from == scheduler:
                    journal.taken_from = ""
                outbox.tell(scheduler, journal.submission(self._name))
        return outbox.messages()

    def give_up_orphans(self) -> list[Outgoing]:
        """No scheduler came back in time."""
        outbox = Outbox()
        for journal in list(self._orphans.values()):
            self._tombstones.bury(journal.request_id)
            self._fail(journal, SCHEDULER_LOST, outbox)
        return outbox.messages()

    def gateway_lost(self, name: str) -> list[Outgoing]:
        """Nobody reads its answers any more."""
        outbox = Outbox()
        for journal in [one for one in self._journals.values() if one.gateway == name]:
            self.abort(journal.request_id)
            outbox.abort(journal, "the gateway was lost")
        return outbox.messages()

    def _catch_up(self, journal: Journal, token_ids: Int32s, outbox: Outbox) -> None:
        for position in range(journal.next_position, len(token_ids)):
            if journal.finished is None:
                self._take(journal, position, token_ids[position], FinishReason.NONE, outbox)

    def _take(
        self, journal: Journal, position: int, token_id: int, finish: int, outbox: Outbox
    ) -> None:
        if position != journal.next_position:
            self._misplaced(journal, position, outbox)
            return
        self.counters.tokens += 1
        journal.behind = False
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
        """A repetition, or tokens before it were lost: then its scheduler must make it up."""
        if position < journal.next_position:
            self.counters.repeated_tokens += 1
            return
        self.counters.late_tokens += 1
        if not journal.behind:
            journal.behind = True
            outbox.tell(journal.scheduler.name, journal.submission(self._name))

    def _stray(self, epoch: Incarnation, handle: Handle, item: Item) -> None:
        life = self._lives.get(epoch)
        if life is not None and handle <= life.last_handle:
            self.counters.late_tokens += num_tokens([item])
        else:
            self.counters.dropped_early_tokens += self._early_tokens.keep(epoch, handle, item)

    def _life(self, scheduler: Identity) -> SchedulerLife:
        life = self._lives.get(scheduler.incarnation)
        if life is None:
            former = [epoch for epoch, one in self._lives.items() if one.name == scheduler.name]
            for epoch in former:
                self._end_life(epoch)
            life = self._lives[scheduler.incarnation] = SchedulerLife(scheduler.name)
        return life

    def _end_life(self, epoch: Incarnation) -> None:
        for journal in self._lives.pop(epoch).journals.values():
            self._orphans[journal.request_id] = journal

    def _fail(self, journal: Journal, failure: Failure, outbox: Outbox) -> None:
        self._forget(journal)
        journal.finished = Finished(
            journal.request_id, FinishReason.ERROR, len(journal.output), failure=failure
        )
        outbox.deltas(journal.gateway).finish(journal.finished)

    def _forget(self, journal: Journal) -> None:
        self._journals.pop(journal.request_id, None)
        self._unbind(journal)

    def _bound(self, journal: Journal) -> bool:
        """Whether its scheduler lives and goes on with it, as far as is known."""
        life = self._lives.get(journal.scheduler.incarnation)
        return life is not None and life.journals.get(journal.handle) is journal

    def _unbind(self, journal: Journal) -> None:
        """From its scheduler, or from those that have none."""
        self._orphans.pop(journal.request_id, None)
        journal.asked = ""
        if (life := self._lives.get(journal.scheduler.incarnation)) is not None:
            life.journals.pop(journal.handle, None)


def _remarks(result: StepResult) -> Iterator[tuple[Handle, Entry | Embedding]]:
    """What comes beside its tokens, and whose it is."""
    embeddings = ((one.handle, one) for one in result.embeddings)
    return chain(entries(result.logprobs) if result.logprobs else (), embeddings)

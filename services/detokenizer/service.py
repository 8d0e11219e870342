"""The detokenizer's messages: requests and tokens in, text out to the gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.decoder import Decoders
from services.detokenizer.journal import Journal
from services.detokenizer.metrics import DetokenizerCollector
from services.detokenizer.outbox import Outgoing
from shared.codec import Identity
from shared.mesh import Mesh
from shared.messages import Abort, Credit, Failed, Message, Open, Recall, StepResult
from shared.metrics import recoveries_counter, total
from shared.model import read_model_info
from shared.schedulers import Schedulers
from shared.service import Service
from shared.settings import BadSetting, Settings, model_path
from shared.types import ServiceName
from shared.undelivered import Undelivered

PATIENCE_SECONDS = 3.0  # with a scheduler that has no executors, where another has some
GRACE_SECONDS = 60.0  # how long requests wait for a scheduler
DOUBT_SECONDS = 2.0  # until the link to a scheduler that we hear of is up, if it lives


class DetokenizerService(Service):
    """One shard: the requests that the gateways route here."""

    service = ServiceName.DETOKENIZER
    talks_to = frozenset({ServiceName.GATEWAY, ServiceName.SCHEDULER})

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        """Loads the tokenizer: nothing can be taken in before that, so the inbox opens after it."""
        super().__init__(settings, mesh)
        path = model_path(settings)
        try:
            model = read_model_info(path, max_model_len=1)  # how long it is matters to others
            self._core = DetokenizerCore(Decoders(path), model.eos_token_ids, mesh.identity.name)
        except ValueError as error:
            raise BadSetting(f"--model: {error}") from error
        self._schedulers = Schedulers()
        self._patience: asyncio.TimerHandle | None = None  # with schedulers without executors
        self._undelivered = Undelivered()
        self._grace: asyncio.TimerHandle | None = None
        self._recoveries = recoveries_counter(self.registry)
        self.registry.register(DetokenizerCollector(self._core))

    @property
    def load(self) -> Mapping[str, float]:
        return {
            "running": self._core.num_open - self._core.num_orphans,
            "waiting": self._core.num_orphans,
            "tokens": self._core.counters.tokens,
            "recoveries": total(self._recoveries),
        }

    @property
    def busy(self) -> bool:
        return self._core.num_open > 0

    def handle(self, message: Message, sender: Identity) -> None:
        match message:
            case StepResult():
                self._send(self._core.step(message))
            case Open():
                self._send(self._core.open(message, sender))
                self._watch_idle()
                if sender.name not in self.mesh.present(sender.service):
                    loop = asyncio.get_running_loop()
                    loop.call_later(DOUBT_SECONDS, self._doubt, sender.name)
            case Credit():
                self._schedulers.credit(sender.name, message)
                self._watch_idle()
            case Abort():
                self._core.abort(message.request_id)
            case Failed():
                self._send(self._core.failed(message))
            case Recall():
                self._send(self._core.recall(message, sender))
        self._find_schedulers()

    def peer_joined(self, service: ServiceName, name: str) -> None:
        for message in self._undelivered.claim(service, name):
            self.mesh.send(service, name, message)
        if service is ServiceName.SCHEDULER:
            # What came before may be of its former life; if not, it has to let go.
            self._send(self._core.take_from([name]))
            self._core.scheduler_lost(name)
        self._find_schedulers()

    def peer_lost(self, service: ServiceName, name: str) -> None:
        self._undelivered.claim(service, name)
        if service is ServiceName.SCHEDULER:
            self._scheduler_lost(name)
        elif service is ServiceName.GATEWAY:
            self._send(self._core.gateway_lost(name))
        self._find_schedulers()

    def _scheduler_lost(self, name: str) -> None:
        self._schedulers.forget(name)
        if orphans := self._core.scheduler_lost(name):
            self._recoveries.labels(ServiceName.SCHEDULER).inc()
            self.log.warning(
                "scheduler lost, another takes its requests", scheduler=name, requests=orphans
            )

    def _doubt(self, scheduler: str) -> None:
        """It may have died before we heard of its request."""
        if scheduler not in self.mesh.present(ServiceName.SCHEDULER):
            self._scheduler_lost(scheduler)
            self._find_schedulers()

    def _find_schedulers(self) -> None:
        """For the requests that have none; they do not wait for ever."""
        if self._core.num_orphans:
            self._send(self._core.resubmit(self._choose))
            if self._grace is None:
                loop = asyncio.get_running_loop()
                self._grace = loop.call_later(GRACE_SECONDS, self._give_up)
        elif self._grace is not None:
            self._grace.cancel()
            self._grace = None

    @property
    def _idle(self) -> list[str]:
        """Schedulers that have requests of ours but no executors, which others have."""
        able = self._schedulers.able(self.mesh.peers(ServiceName.SCHEDULER))
        return sorted(self._core.schedulers.difference(able)) if able else []

    def _watch_idle(self) -> None:
        """An executor that comes back soon finds its requests where they were."""
        if self._idle and self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(PATIENCE_SECONDS, self._take_from_idle)

    def _take_from_idle(self) -> None:
        self._patience = None
        if idle := self._idle:
            self.log.warning("requests go to schedulers with executors", former=idle)
            self._send(self._core.take_from(idle))
            self._find_schedulers()

    def _choose(self, journal: Journal) -> str | None:
        present = self.mesh.peers(ServiceName.SCHEDULER)
        return self._schedulers.choose(present, journal.prompt, journal.cache_salt)

    def _give_up(self) -> None:
        self._grace = None
        self._send(self._core.give_up_orphans())

    def _send(self, outgoing: Iterable[Outgoing]) -> None:
        for service, name, message in outgoing:
            if not self.mesh.send(service, name, message):
                self._undelivered.keep(service, name, message)

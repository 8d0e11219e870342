"""The services of a simulated mesh.

Gateway's flights, scheduler and detokenizer are the real ones; tokenizer and model executor are as
simple as they can be.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import compress

from services.detokenizer.service import DetokenizerService
from services.gateway.flights import Flights
from services.gateway.metrics import GatewayMetrics
from services.gateway.routing import Outstanding
from services.model_executor.belonging import Belonging
from services.scheduler.service import SchedulerService
from shared.codec import Identity
from shared.messages import (
    Abort,
    Accepted,
    Admitted,
    Credit,
    Deltas,
    Generate,
    Gone,
    Logprobs,
    Message,
    Plan,
    Refused,
    Roster,
    StepResult,
    Submit,
    Withdraw,
)
from shared.schedulers import Schedulers
from shared.types import ServiceName, int32s
from shared.undelivered import Undelivered
from tests.recovery.network import Network, Node, SimulatedMesh
from tests.recovery.telling_executor import TellingExecutor

GATEWAY, TOKENIZER, SCHEDULER, EXECUTOR, DETOKENIZER = ServiceName


class GatewayNode(Node):
    talks_to = frozenset({TOKENIZER, SCHEDULER, DETOKENIZER})

    def __init__(self, network: Network, mesh: SimulatedMesh) -> None:
        super().__init__(network, mesh)
        metrics = GatewayMetrics(mesh.registry)
        self.flights = Flights(mesh.identity.name, mesh, Outstanding(), metrics)

    def handle(self, message: Message, sender: Identity) -> None:
        match message:
            case Deltas():
                self.flights.deltas(message, sender.name)
            case Accepted():
                self.flights.accepted(message, sender.name)
            case Admitted():
                self.flights.admitted(message)
            case Gone():
                self.flights.gone(message)
            case Refused():
                self.flights.refused(message)

    def joined(self, service: ServiceName, name: str) -> None:
        self.flights.joined(service, name)

    def lost(self, service: ServiceName, name: str) -> None:
        self.flights.lost(service, name)


class TokenizerNode(Node):
    """All prompts are token ids already."""

    talks_to = frozenset({SCHEDULER, GATEWAY})

    def __init__(self, network: Network, mesh: SimulatedMesh) -> None:
        super().__init__(network, mesh)
        self._jobs: deque[Generate] = deque()
        self._schedulers = Schedulers()

    def lost(self, service: ServiceName, name: str) -> None:
        self._schedulers.forget(name)

    def handle(self, message: Message, sender: Identity) -> None:
        if isinstance(message, Credit):
            self._schedulers.credit(sender.name, message)
        elif isinstance(message, Generate):
            self._jobs.append(message)
        elif isinstance(message, Abort):
            self._jobs = deque(j for j in self._jobs if j.request_id != message.request_id)

    def work(self) -> Callable[[], None] | None:
        ready = self._jobs and self.mesh.peers(SCHEDULER)
        return self._submit if ready else None

    def _submit(self) -> None:
        job = self._jobs.popleft()
        assert job.prompt.token_ids is not None
        request = Submit(job.request_id, job.prompt.token_ids, job.params, job.route)
        names = self.mesh.peers(SCHEDULER)
        scheduler = self._schedulers.choose(names, request.token_ids, request.cache_salt)
        assert scheduler is not None
        self.mesh.send(SCHEDULER, scheduler, request)


class ExecutorNode(Node):
    """The service's sessions around the strict executor."""

    talks_to = frozenset({SCHEDULER, DETOKENIZER})

    def __init__(self, network: Network, mesh: SimulatedMesh) -> None:
        super().__init__(network, mesh)
        self._network = network
        self._scheduler: Identity | None = None
        self._undelivered = Undelivered()
        self._belonging = Belonging(mesh.identity.name)
        self._session = 1000 * mesh.identity.incarnation
        self._drop()

    def _drop(self) -> None:
        self._session += 1
        self._scheduler = None
        self.executor = TellingExecutor(replace(self._network.capacity, session=self._session))
        self._plans: deque[Plan] = deque()
        self._leased: Plan | None = None
        self._iteration = 0

    def handle(self, message: Message, sender: Identity) -> None:
        if isinstance(message, Roster):
            if self._belonging.hear(sender.name, message.executors):
                if self._scheduler is not None:
                    self._drop()
                self._announce()
            self._find_scheduler()
        elif isinstance(message, Plan) and sender.name != self._belonging.scheduler:
            self.mesh.send(SCHEDULER, sender.name, Withdraw())
        elif isinstance(message, Plan) and message.session == self._session:
            self._scheduler = sender
            self._plans.append(message)

    def joined(self, service: ServiceName, name: str) -> None:
        for message in self._undelivered.claim(service, name):
            self.mesh.send(service, name, message)
        if service is SCHEDULER:
            self._find_scheduler()

    def lost(self, service: ServiceName, name: str) -> None:
        self._undelivered.claim(service, name)
        if service is SCHEDULER:
            if self._belonging.lose(name):
                self._drop()
            self._find_scheduler()

    def _find_scheduler(self) -> None:
        present, former = self.mesh.peers(SCHEDULER), self._belonging.scheduler
        seek = self._belonging.choose if former is None else self._belonging.better
        if (chosen := seek(present)) is None:
            return
        if former is not None:
            self.mesh.send(SCHEDULER, former, Withdraw())
            self._drop()
        self._belonging.join(chosen)
        self._announce()

    def _announce(self) -> None:
        assert self._belonging.scheduler is not None
        self.mesh.send(SCHEDULER, self._belonging.scheduler, self.executor.capacity)

    def work(self) -> Callable[[], None] | None:
        leased = self._leased is not None and self._iteration < self._leased.lease
        return self._compute if self._plans or leased else None

    def _compute(self) -> None:
        if self._plans:
            self._leased, self._iteration = self._plans.popleft(), 0
            result = self.executor.execute(self._leased)
        else:
            assert self._leased is not None
            self._iteration += 1
            result = self.executor.repeat(self._leased, self._iteration)
        if not result.handles:
            self._leased = None
        assert self._scheduler is not None
        result = replace(result, epoch=self._scheduler.incarnation)
        self.mesh.send(SCHEDULER, self._scheduler.name, result)
        owners = {
            int(o.entered.handle): o.entered.detokenizer for o in self.executor.slots.values()
        }
        logprobs, embeddings = self.executor.claim(result)
        told = [*result.handles, *(logprobs.handles if logprobs else ())]
        told += [one.handle for one in embeddings]
        for name in sorted({owners[handle] for handle in told}):
            part = replace(
                _rows(result, [owners[handle] == name for handle in result.handles]),
                logprobs=logprobs
                and _entries(logprobs, [owners[handle] == name for handle in logprobs.handles]),
                embeddings=[one for one in embeddings if owners[one.handle] == name],
            )
            if not self.mesh.send(DETOKENIZER, name, part):
                self._undelivered.keep(DETOKENIZER, name, part)


def _rows(result: StepResult, own: list[bool]) -> StepResult:
    return replace(
        result,
        handles=int32s(compress(result.handles, own)),
        positions=int32s(compress(result.positions, own)),
        token_ids=int32s(compress(result.token_ids, own)),
        finishes=bytes(compress(result.finishes, own)),
    )


def _entries(logprobs: Logprobs, own: list[bool]) -> Logprobs:
    values = struct.unpack(f"<{len(own)}f", logprobs.values)
    return Logprobs(
        handles=int32s(compress(logprobs.handles, own)),
        positions=int32s(compress(logprobs.positions, own)),
        ranks=int32s(compress(logprobs.ranks, own)),
        counts=int32s(compress(logprobs.counts, own)),
        token_ids=int32s(compress(logprobs.token_ids, own)),
        values=struct.pack(f"<{sum(own)}f", *compress(values, own)),
    )


class ServiceNode(Node):
    """A real service."""

    kind: type[SchedulerService | DetokenizerService]

    def __init__(self, network: Network, mesh: SimulatedMesh) -> None:
        super().__init__(network, mesh)
        self.service = self.kind(network.settings, mesh)  # type: ignore[arg-type]
        self.talks_to = self.service.talks_to - {self.service.service}

    def handle(self, message: Message, sender: Identity) -> None:
        self.service.handle(message, sender)

    def joined(self, service: ServiceName, name: str) -> None:
        self.service.peer_joined(service, name)

    def leaving(self, service: ServiceName, name: str) -> None:
        self.service.peer_leaving(service, name)

    def lost(self, service: ServiceName, name: str) -> None:
        self.service.peer_lost(service, name)


class SchedulerNode(ServiceNode):
    kind = SchedulerService


class DetokenizerNode(ServiceNode):
    kind = DetokenizerService


KINDS: dict[ServiceName, type[Node]] = {
    GATEWAY: GatewayNode,
    TOKENIZER: TokenizerNode,
    SCHEDULER: SchedulerNode,
    EXECUTOR: ExecutorNode,
    DETOKENIZER: DetokenizerNode,
}

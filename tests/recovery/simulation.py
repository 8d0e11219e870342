"""The services of a mesh in one process, on a network and a clock of the test's own.

Gateway's flights, scheduler and detokenizer are the real ones; tokenizer and model executor are as
simple as they can be. Frames are delivered in the order of each link, and links in any order;
what was on its way from or to a process that dies may arrive or not; and everyone hears of a
death at a time of his own.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import UUID

from prometheus_client import CollectorRegistry

from services.detokenizer.service import DetokenizerService
from services.gateway.flights import Flights
from services.gateway.metrics import GatewayMetrics
from services.gateway.routing import Outstanding
from services.model_executor.belonging import Belonging
from services.scheduler.service import SchedulerService
from shared.codec import Identity, decode, encode
from shared.messages import (
    Abort,
    Accepted,
    Admitted,
    Announce,
    Credit,
    Deltas,
    Generate,
    Gone,
    Leaving,
    Message,
    Plan,
    Refused,
    Roster,
    Submit,
    Withdraw,
)
from shared.schedulers import Schedulers
from shared.settings import Settings
from shared.types import Incarnation, ServiceName, int32s
from shared.undelivered import Undelivered
from tests.services.scheduler.strict_executor import VOCAB_SIZE, StrictExecutor

GATEWAY, TOKENIZER, SCHEDULER, EXECUTOR, DETOKENIZER = ServiceName
Value = TypeVar("Value")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still unless the test lets it pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@dataclass
class Link:
    """From one life of an instance to a life of another."""

    source: Node
    target: Node
    frames: deque[bytes] = field(default_factory=deque)
    up: bool = True  # as far as the source knows
    leaving: bool = False  # the target, as far as the source knows
    speaker: Incarnation | None = None  # who speaks under the target's name, once it has


class SimulatedMesh:
    """One instance's place in the simulated network."""

    def __init__(self, network: Network, service: ServiceName, name: str, life: int) -> None:
        self.identity = Identity(service, name, Incarnation(life))
        self.registry = CollectorRegistry()
        self.links: dict[str, Link] = {}  # by the target's name
        self.leaving = False
        self._network = network

    def peers(self, service: ServiceName) -> list[str]:
        return [name for name in self.present(service) if not self.links[name].leaving]

    def present(self, service: ServiceName) -> list[str]:
        return sorted(
            name
            for name, link in self.links.items()
            if link.target.mesh.identity.service is service
        )

    def withdraw(self) -> None:
        self.leaving = True
        for service in ServiceName:
            self.broadcast(service, Leaving())

    def send(self, service: ServiceName, name: str, message: Message) -> bool:
        link = self.links.get(name)
        if link is None:
            return False
        if link.target.alive:  # else the frame is lost, and nobody knows yet
            link.frames.append(encode(message, self.identity, 0))
        return True

    def broadcast(self, service: ServiceName, message: Message) -> None:
        for name in self.present(service):
            self.send(service, name, message)


class Node:
    """One life of an instance."""

    talks_to: frozenset[ServiceName]

    def __init__(self, network: Network, mesh: SimulatedMesh) -> None:
        self.mesh = mesh
        self.alive = True

    def handle(self, message: Message, sender: Identity) -> None: ...
    def joined(self, service: ServiceName, name: str) -> None: ...
    def leaving(self, service: ServiceName, name: str) -> None: ...
    def lost(self, service: ServiceName, name: str) -> None: ...

    def work(self) -> Callable[[], None] | None:
        """What it could do by itself now."""
        return None


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
        self.executor = StrictExecutor(
            replace(self._network.capacity, session=self._session), ahead=True
        )
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
        for name in sorted({owners[handle] for handle in result.handles}):
            rows = [row for row, handle in enumerate(result.handles) if owners[handle] == name]
            part = replace(
                result,
                handles=int32s(result.handles[row] for row in rows),
                positions=int32s(result.positions[row] for row in rows),
                token_ids=int32s(result.token_ids[row] for row in rows),
                finishes=bytes(result.finishes[row] for row in rows),
            )
            if not self.mesh.send(DETOKENIZER, name, part):
                self._undelivered.keep(DETOKENIZER, name, part)


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


class Network:
    """Who lives, what is on its way, and what happens next."""

    def __init__(self, rng: random.Random, settings: Settings, capacity: Announce) -> None:
        self.rng = rng
        self.settings = settings
        self.capacity = capacity
        self.loop = VirtualLoop()
        self.nodes: dict[str, Node] = {}  # that live, by name
        self._links: list[Link] = []  # that have frames or a living source
        self._lives = 0

    def call(self, act: Callable[[], Value]) -> Value:
        """On the loop, with all that it leads to at once."""

        async def acting() -> Value:
            value = act()
            for _ in range(3):
                await asyncio.sleep(0)
            return value

        return self.loop.run_until_complete(acting())

    def start(self, service: ServiceName, index: int = 0) -> None:
        name = f"{service}.{index}"
        assert name not in self.nodes
        self._lives += 1
        mesh = SimulatedMesh(self, service, name, self._lives)
        self.nodes[name] = self.call(lambda: KINDS[service](self, mesh))

    def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        node.alive = False
        for link in self._links:
            if link.target is node:
                link.frames.clear()
            elif link.source is node:
                link.up = False
                arrive = self.rng.randint(0, len(link.frames))
                while len(link.frames) > arrive:
                    link.frames.pop()
        self._tidy()

    def step(self) -> bool:
        """Let one thing happen; False if nothing can."""
        events = list(self._events())
        if events:
            self.call(self.rng.choice(events))
        return bool(events)

    def pass_time(self, seconds: float) -> None:
        self.loop.now += seconds
        self.call(lambda: None)

    def _events(self) -> Iterator[Callable[[], None]]:
        for node in self.nodes.values():
            if (work := node.work()) is not None:
                yield work
            for other in self.nodes.values():
                if self._unlinked(node, other):
                    yield lambda node=node, other=other: self._join(node, other)  # type: ignore[misc]
        for link in self._links:
            if link.frames:
                yield lambda link=link: self._deliver(link)  # type: ignore[misc]
            if link.up and not link.target.alive:
                yield lambda link=link: self._lose(link)  # type: ignore[misc]

    def _unlinked(self, node: Node, other: Node) -> bool:
        identity = other.mesh.identity
        return (
            node is not other
            and identity.service in node.talks_to
            and identity.name not in node.mesh.links
        )

    def _join(self, node: Node, other: Node) -> None:
        identity = other.mesh.identity
        link = node.mesh.links[identity.name] = Link(node, other)
        self._links.append(link)
        if node.mesh.leaving:
            node.mesh.send(identity.service, identity.name, Leaving())
        node.joined(identity.service, identity.name)

    def _lose(self, link: Link) -> None:
        identity = link.target.mesh.identity
        link.up = False
        link.frames.clear()
        del link.source.mesh.links[identity.name]
        self._tidy()
        link.source.lost(identity.service, identity.name)

    def _deliver(self, link: Link) -> None:
        message, sender, _ = decode(link.frames.popleft())
        node = link.target
        back = node.mesh.links.get(sender.name)
        if back is not None and back.speaker != sender.incarnation:
            if back.speaker is None:
                back.speaker = sender.incarnation
            else:
                self._lose(back)
        self._tidy()
        if not isinstance(message, Leaving):
            node.handle(message, sender)
        elif (back := node.mesh.links.get(sender.name)) is not None and not back.leaving:
            back.leaving = True
            node.leaving(sender.service, sender.name)

    def _tidy(self) -> None:
        self._links = [link for link in self._links if link.up or link.frames]


@contextmanager
def network(rng: random.Random, settings: Settings, **capacity: Any) -> Iterator[Network]:
    whole = Announce("model", **capacity, vocab_size=VOCAB_SIZE)
    mesh = Network(rng, settings, whole)
    try:
        with patch("uuid.uuid4", lambda: UUID(int=rng.getrandbits(128))):  # else no run repeats
            yield mesh
    finally:
        mesh.loop.close()

"""A network and a clock of the test's own, for a mesh in one process.

Frames are delivered in the order of each link, and links in any order; what was on its way from
or to a process that dies may arrive or not; and everyone hears of a death at a time of his own.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from unittest.mock import patch
from uuid import UUID

from prometheus_client import CollectorRegistry

from shared.codec import Identity, decode, encode
from shared.messages import Announce, Leaving, Message
from shared.settings import Settings
from shared.types import Incarnation, ServiceName

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


class Network:
    """Who lives, what is on its way, and what happens next."""

    def __init__(
        self,
        kinds: Mapping[ServiceName, type[Node]],
        rng: random.Random,
        settings: Settings,
        capacity: Announce,
    ) -> None:
        self._kinds = kinds
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
        self._hear_out(name)
        self._lives += 1
        mesh = SimulatedMesh(self, service, name, self._lives)
        self.nodes[name] = self.call(lambda: self._kinds[service](self, mesh))

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

    def _hear_out(self, name: str) -> None:
        """That a former life was leaving is heard before the next one is there, or never."""
        for link in self._links:
            if link.source.mesh.identity.name == name:
                messages = [(frame, decode(frame)[0]) for frame in link.frames]
                link.frames = deque(
                    f for f, message in messages if not isinstance(message, Leaving)
                )
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
def network(
    kinds: Mapping[ServiceName, type[Node]],
    rng: random.Random,
    settings: Settings,
    capacity: Announce,
) -> Iterator[Network]:
    mesh = Network(kinds, rng, settings, capacity)
    try:
        with patch("uuid.uuid4", lambda: UUID(int=rng.getrandbits(128))):  # else no run repeats
            yield mesh
    finally:
        mesh.loop.close()

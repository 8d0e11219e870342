"""Members of a mesh that note all they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import zmq

from shared.codec import Identity
from shared.mesh import Mesh, MeshAddress
from shared.messages import Abort, Message
from shared.settings import Settings
from shared.types import RequestId, ServiceName

PATIENCE = 30.0  # seconds until a test that waits in vain is told so


class Member:
    """One instance in the mesh under test."""

    def __init__(self, address: MeshAddress, service: ServiceName, *talks_to: ServiceName) -> None:
        self.mesh = Mesh(service, address, talks_to)
        self.service = service
        self.name = self.mesh.identity.name
        self.events: list[tuple[str, str]] = []  # ("joined", "lost" or "leaving", name)
        self.heard: list[str] = []  # the texts, in order
        self.senders: set[Identity] = set()
        self.answers: list[Message] = []  # all that is no text
        self.on_heard: Callable[[], None] = lambda: None

    def tell(self, other: Member, text: str | int, padding: str = "") -> bool:
        return self.mesh.send(other.service, other.name, Abort(RequestId(str(text)), padding))

    def sees(self, other: Member) -> bool:
        return other.name in self.mesh.peers(other.service)

    def metric(self, name: str) -> float:
        value = self.mesh.registry.get_sample_value(f"headrace_mesh_{name}_total")
        assert value is not None, name
        return value

    @asynccontextmanager
    async def present(self) -> AsyncIterator[Member]:
        """In the mesh, until left."""
        self.mesh.open(
            self._hear,
            lambda service, name: self.events.append(("joined", name)),
            lambda service, name: self.events.append(("lost", name)),
            lambda service, name: self.events.append(("leaving", name)),
        )
        discovery = asyncio.create_task(self.mesh.discover())
        try:
            yield self
        finally:
            discovery.cancel()
            result = await asyncio.gather(discovery, return_exceptions=True)
            self.mesh.close()
            assert isinstance(result[0], asyncio.CancelledError), result

    def _hear(self, message: Message, sender: Identity) -> None:
        self.senders.add(sender)
        if isinstance(message, Abort):
            self.heard.append(message.request_id)
            self.on_heard()
        else:
            self.answers.append(message)


class IpcMembers:
    """Makes members of one mesh in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, service: ServiceName, *talks_to: ServiceName, index: int = 0) -> Member:
        settings = Settings(mesh=f"ipc:{self.directory}", index=index)
        return Member(MeshAddress.from_settings(service, settings), service, *talks_to)


class TcpMembers:
    """Makes members of one mesh on 127.0.0.1, each on a port of its own."""

    def __init__(self, ports: dict[ServiceName, list[int]], keys: Path | None = None) -> None:
        self._ports = ports
        self._security: dict[str, Any] = {"allow_plain_tcp": True}
        if keys is not None:
            self._security = {"mesh_keys": str(keys)}
        addresses = [f"{name}=127.0.0.1:{port}" for name in ports for port in ports[name]]
        self._mesh = "static:" + ",".join(addresses)

    def with_keys(self, keys: Path) -> TcpMembers:
        """Of the same places, but with these keys."""
        return TcpMembers(self._ports, keys)

    def endpoint(self, service: ServiceName) -> str:
        return f"tcp://127.0.0.1:{self._ports[service][0]}"

    def __call__(self, service: ServiceName, *talks_to: ServiceName, index: int = 0) -> Member:
        port = self._ports[service][index]
        settings = Settings(mesh=self._mesh, mesh_port=port, **self._security)
        return Member(MeshAddress.from_settings(service, settings), service, *talks_to)


@contextmanager
def raw_push(directory: Path, name: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket that can say anything to the inbox of this instance."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.set(zmq.LINGER, 0)
        push.set(zmq.RECONNECT_IVL, -1)
        push.connect(f"ipc://{directory}/{name}.sock")
        yield push


async def until(condition: Callable[[], Any]) -> None:
    """Wait until something in this process has become true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

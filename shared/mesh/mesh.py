"""One instance's place in the mesh: its inbox, and a peer for each instance it talks to."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

import structlog
import zmq
from prometheus_client import CollectorRegistry

from shared.codec import MAX_FRAME_BYTES, BadFrame, Identity, decode, encode
from shared.mesh.curve import Gatekeeper
from shared.mesh.inbox import Inbox
from shared.mesh.metrics import MeshMetrics
from shared.mesh.peer import Peer
from shared.mesh.resolver import MeshAddress
from shared.messages import Leaving, Message
from shared.rarely import Rarely
from shared.types import Incarnation, ServiceName

LOOK_AGAIN_SECONDS = 0.05  # after a peer joined or was lost; doubles up to the maximum
LOOK_AGAIN_MAX_SECONDS = 2.0

Handle = Callable[[Message, Identity], None]
PeerEvent = Callable[[ServiceName, str], None]


def _unheard(service: ServiceName, name: str) -> None:
    """Nobody wants to be told."""


class Mesh:
    """Sends never block; what arrives, joins, leaves or is lost is told by the callbacks of `open`.

    Whoever leaves is still there: what was begun with it goes on, until it is lost.
    """

    def __init__(
        self,
        service: ServiceName,
        address: MeshAddress,
        talks_to: Iterable[ServiceName],
    ) -> None:
        self.identity = Identity(service, address.name, Incarnation(secrets.randbits(63)))
        self._address = address
        self._peers: dict[ServiceName, dict[str, Peer]] = {other: {} for other in talks_to}
        self._leaving = False
        self._look_now = asyncio.Event()
        self._log = structlog.get_logger("mesh")
        self._drops = Rarely("mesh")
        self._metrics = MeshMetrics(self.identity)

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    @property
    def figures(self) -> Mapping[str, float]:
        """What an instance's status says of its inbox and its peers."""
        return {
            "inbox_peak": self._inbox.peak,
            "undelivered": self._metrics.num_undelivered,
        }

    def open(
        self, handle: Handle, joined: PeerEvent, lost: PeerEvent, left: PeerEvent = _unheard
    ) -> None:
        """Bind the inbox; raises zmq.ZMQError if the address is taken."""
        self._handle, self._joined, self._lost, self._left = handle, joined, lost, left
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            keys = self._address.keys
            self._gatekeeper = None if keys is None else Gatekeeper(self._context, keys)
            self._inbox = Inbox(
                self._context, self._address.bind, self._on_frame, self._metrics.late, keys
            )
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def withdraw(self) -> None:
        """Have all who are or will be linked to us choose others for what is new."""
        self._leaving = True
        for service in self._peers:
            self.broadcast(service, Leaving())

    def close(self) -> None:
        """Leave the mesh; only after `open`."""
        for peers in self._peers.values():
            for peer in peers.values():
                peer.close()
            peers.clear()
        self._inbox.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.destroy(linger=0)
        self._address.leave()

    def abandon(self) -> None:
        """Remove what all instances of this mesh share on disk."""
        self._address.abandon()

    def peers(self, service: ServiceName) -> list[str]:
        """Names of the instances that can be given something new, sorted."""
        peers = self._peers[service].items()
        return sorted(name for name, peer in peers if peer.live and not peer.leaving)

    def present(self, service: ServiceName) -> list[str]:
        """Names of all live instances, those that leave among them, sorted."""
        return sorted(name for name, peer in self._peers[service].items() if peer.live)

    def send(self, service: ServiceName, name: str, message: Message) -> bool:
        """Queue a message; False if there is no such live peer."""
        return self._push(service, name, encode(message, self.identity, time.monotonic_ns()))

    def misdirected(self, message: Message, sender: Identity) -> None:
        """A message that came is not for us, or not the sender's to send: it was dropped."""
        self._metrics.misdirected.inc()
        kind, claimed = type(message).__name__, str(sender.service)
        self._drops.warning("misdirected message dropped", message=kind, sender=claimed)

    def broadcast(self, service: ServiceName, message: Message) -> None:
        """Queue a message for every live instance of a service."""
        frame = encode(message, self.identity, time.monotonic_ns())
        for name in self.present(service):
            self._push(service, name, frame)

    async def discover(self) -> None:
        """Keep the peers in step with the resolver; runs until cancelled."""
        pause = LOOK_AGAIN_SECONDS
        while True:
            self._look_now.clear()
            for service in self._peers:
                await self._look(service)
            await asyncio.sleep(LOOK_AGAIN_SECONDS)  # a peer that keeps failing is no busy loop
            try:
                async with asyncio.timeout(pause):  # wait_for may swallow a cancellation
                    await self._look_now.wait()
                pause = LOOK_AGAIN_SECONDS
            except TimeoutError:
                pause = min(2 * pause, LOOK_AGAIN_MAX_SECONDS)

    async def _look(self, service: ServiceName) -> None:
        found = dict(await self._address.resolver.resolve(service))
        if service is self.identity.service:
            found.pop(self.identity.name, None)
        peers = self._peers[service]
        for name in [name for name, peer in peers.items() if name not in found and not peer.live]:
            peers.pop(name).close()
        for name in found.keys() - peers.keys():
            peers[name] = self._connect(service, name, found[name])

    def _connect(self, service: ServiceName, name: str, endpoint: str) -> Peer:
        def on_joined() -> None:
            self._log.debug("peer joined", peer=name)
            self._look_now.set()
            if self._leaving:
                self.send(service, name, Leaving())
            self._joined(service, name)
            self._tell_leaving(service, name)

        def on_ended(had_joined: bool) -> None:
            if had_joined:
                self._lose(service, name, "disconnected")
            else:
                del self._peers[service][name]  # the next look tries again

        return Peer(self._context, endpoint, on_joined, on_ended, self._address.keys)

    def _lose(self, service: ServiceName, name: str, reason: str) -> None:
        self._unlink(service, name, reason)
        self._lost(service, name)

    def _unlink(self, service: ServiceName, name: str, reason: str) -> None:
        self._peers[service].pop(name).close()
        self._log.info("peer lost", peer=name, reason=reason)
        self._look_now.set()

    def _note_life(self, sender: Identity) -> None:
        """Another incarnation under a peer's name: our link still leads to the former one."""
        peer = self._peers.get(sender.service, {}).get(sender.name)
        if peer is None or not peer.live or peer.incarnation == sender.incarnation:
            return
        if peer.incarnation is None:
            peer.incarnation = sender.incarnation
        else:
            self._lose(sender.service, sender.name, "restarted")

    def _note_leaving(self, sender: Identity) -> None:
        """Its next life is another peer, and does not leave."""
        peer = self._peers.get(sender.service, {}).get(sender.name)
        if peer is not None and not peer.leaving:
            self._log.debug("peer leaves", peer=sender.name)
            peer.leaving = True
            self._tell_leaving(sender.service, sender.name)

    def _tell_leaving(self, service: ServiceName, name: str) -> None:
        """Of a peer that has joined: it may have said so before we were linked to it."""
        peer = self._peers[service].get(name)
        if peer is not None and peer.live and peer.leaving:
            self._left(service, name)

    def _push(self, service: ServiceName, name: str, frame: bytes) -> bool:
        peer = self._peers.get(service, {}).get(name)
        if len(frame) > MAX_FRAME_BYTES:  # its inbox would break the link
            self._log.error("message too long", peer=name, bytes=len(frame))
        elif peer is not None and peer.send(frame):
            self._metrics.sent.inc()
            return True
        elif peer is not None and peer.live:
            # Dropping one message of a stream would corrupt it: give up the whole link instead.
            self._unlink(service, name, "queue full or broken")
            asyncio.get_running_loop().call_soon(self._lost, service, name)  # not amid a send
        self._metrics.undelivered.inc()
        return False

    def _on_frame(self, frame: bytes) -> None:
        self._metrics.received.inc()
        try:
            message, sender, sent = decode(frame)
        except BadFrame as error:
            self._metrics.bad.inc()
            self._drops.warning("bad frame dropped", reason=str(error), bytes=len(frame))
            return
        self._metrics.hop(sender.service, sent)
        self._note_life(sender)
        if isinstance(message, Leaving):
            self._note_leaving(sender)
        else:
            self._handle(message, sender)

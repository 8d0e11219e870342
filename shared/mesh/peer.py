"""One PUSH socket to one other instance's inbox, and whether anybody is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.mesh.curve import MeshKeys
from shared.types import Incarnation

HIGH_WATER_MARK = 8192  # frames; a peer that lets this many lie is as good as dead
NO_RECONNECT = -1  # ZeroMQ would hand what is queued for the former life to the next one
CONNECT_TIMEOUT_MS = 5000
HEARTBEAT_MS = 5000
HEARTBEAT_TIMEOUT_MS = 20000  # a host that vanished without closing its connections


class Peer:
    """One connection: refused, timed out or broken, it has ended, and its queue with it.

    A new attempt, and so a new life of the instance, is a new Peer.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_joined: Callable[[], None],
        on_ended: Callable[[bool], None],  # told whether it had joined
        keys: MeshKeys | None = None,
    ) -> None:
        self.live = False
        self.leaving = False  # it has said so
        self.incarnation: Incarnation | None = None  # who speaks under its name, once it has
        self._on_joined = on_joined
        self._on_ended = on_ended
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.RECONNECT_IVL, NO_RECONNECT)
        self._socket.set(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        if keys is not None:
            keys.protect_peer(self._socket)
        self._monitor = self._socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED
        )
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._socket.connect(endpoint)
        self._loop.call_soon(self._read_monitor)

    def send(self, frame: bytes) -> bool:
        """Queue a frame; False if the link is not up or its queue is full."""
        if not self.live:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        if not self._socket.closed:
            self.live = False
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)

    def _read_monitor(self) -> None:
        while not self._socket.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.live = True
                self._on_joined()
            else:
                had_joined = self.live
                self.close()
                self._on_ended(had_joined)

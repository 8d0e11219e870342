"""One PUSH socket to one other instance's inbox, and whether anybody is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

HIGH_WATER_MARK = 8192  # frames; a peer that lets this many lie is as good as dead
RECONNECT_MS = 20
RECONNECT_MAX_MS = 1000
HEARTBEAT_MS = 5000
HEARTBEAT_TIMEOUT_MS = 20000  # a host that vanished without closing its connections


class Peer:
    """Connects until it succeeds, once: a link that breaks is lost, and its queue with it.

    A new life of the instance gets a new Peer, so nothing meant for the former reaches it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_joined: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.live = False
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
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
            if event == zmq.Event.HANDSHAKE_SUCCEEDED and not self.live:
                self.live = True
                self._on_joined()
            elif event == zmq.Event.DISCONNECTED and self.live:
                self.close()
                self._on_lost()

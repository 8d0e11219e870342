"""The one PULL socket of an instance, read without a future per message."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable

import zmq

from shared.codec import MAX_FRAME_BYTES
from shared.mesh.curve import MeshKeys
from shared.mesh.strangers import Strangers

HIGH_WATER_MARK = 8192  # frames; reached, the sender's own queue fills next
DRAIN_LIMIT = 128  # frames handled before other callbacks of the loop get their turn
STALL_CHECK_SECONDS = 1.0  # the FD is edge-triggered: should an edge be lost, this finds the frames


class Inbox:
    """Calls `on_frame` on the running loop for each frame that arrives.

    Now and then it tells `on_late` how many seconds late the loop is, by a timer it needs anyway.
    Raises zmq.ZMQError if the endpoint is taken.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_frame: Callable[[bytes], None],
        on_late: Callable[[float], None],
        keys: MeshKeys | None = None,
    ) -> None:
        _refuse_taken(endpoint)
        self._on_frame = on_frame
        self._on_late = on_late
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._strangers: Strangers | None = None
        if keys is not None:
            keys.protect_inbox(self._socket)
            self._strangers = Strangers(self._socket)
        self._socket.bind(endpoint)
        self._more = False  # a turn of `_drain` is due
        self._in_a_row = 0  # frames read since it was empty
        self.peak = 0  # most that ever were
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._check_later()

    def close(self) -> None:
        if not self._socket.closed:
            self._stall_check.cancel()
            self._loop.remove_reader(self._socket.fileno())
            if self._strangers is not None:
                self._strangers.close()
            self._socket.close()

    def _on_readable(self) -> None:
        if not self._more:  # else the frames would get two turns in one round of the loop
            self._drain()

    def _drain(self) -> None:
        self._more = False
        for _ in range(DRAIN_LIMIT):
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self.peak = max(self.peak, self._in_a_row)
                self._in_a_row = 0
                return
            self._in_a_row += 1
            self._on_frame(frame)
        self._more = True
        self._loop.call_soon(self._drain)  # no new edge comes for what is already there

    def _check_later(self) -> None:
        due = time.monotonic() + STALL_CHECK_SECONDS
        self._stall_check = self._loop.call_later(STALL_CHECK_SECONDS, self._check_stall, due)

    def _check_stall(self, due: float) -> None:
        self._on_late(time.monotonic() - due)
        self._on_readable()
        if not self._socket.closed:
            self._check_later()


def _refuse_taken(endpoint: str) -> None:
    """ZeroMQ unlinks an ipc path before it binds, be it a dead one's or another live instance's."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise zmq.ZMQError(errno.EADDRINUSE)

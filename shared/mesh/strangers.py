"""Who knocked at an inbox and is no member: told in the log, but not once for each try."""

from __future__ import annotations

import asyncio

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.rarely import Rarely

NO_MECHANISM, NO_KEY = 0x11000002, 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_*, of a handshake
REASONS = {NO_MECHANISM: "without keys", NO_KEY: "with keys of another mesh"}


class Strangers:
    """Watches an inbox that is protected by keys.

    Whoever knows the inbox's public key, but has another of its own, is the Gatekeeper's to tell.
    Who leaves before the handshake fails is not told of: so do health checks, which only connect.
    """

    def __init__(self, inbox: zmq.Socket[bytes]) -> None:
        self._inbox = inbox
        self._log = Rarely("mesh")
        self._monitor = inbox.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor.fileno(), self._read)
        self._loop.call_soon(self._read)

    def close(self) -> None:
        self._loop.remove_reader(self._monitor.fileno())
        self._inbox.disable_monitor()
        self._monitor.close(0)

    def _read(self) -> None:
        while not self._monitor.closed:
            try:
                error = int(recv_monitor_message(self._monitor, zmq.NOBLOCK)["value"])
            except zmq.Again:
                return
            how = REASONS.get(error, f"with what is no handshake: {error:#x}")
            self._log.warning("stranger turned away", how, how=how)

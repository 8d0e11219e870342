"""Taking connections in: a few in each turn of the loop, and no more than there is room for.

The loop's own server takes one in each turn, so new clients wait long while others press; and where
handles run out, it closes connections without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

import structlog

AT_ONCE = 8  # in one turn, so that streams do not wait for a crowd
PAUSE_SECONDS = 1.0  # after the system could give no connection


class Acceptor:
    """`held` counts the connections there are; with `most` of them, others wait in the backlog."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        held: Callable[[], int],
        most: int,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._held = held
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._listening = False
        self._closed = False
        self._log = structlog.get_logger("http")

    def start(self) -> None:
        self._listener.setblocking(False)
        self.resume()

    def resume(self) -> None:
        """Go on, if there was no room."""
        if not self._listening and not self._closed:
            self._listening = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Take no more in; whoever else has the socket may."""
        self._pause()
        self._closed = True

    def close(self) -> None:
        self.stop()
        for task in self._opening:
            task.cancel()

    def _pause(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self._held() + len(self._opening) >= self._most:
                self._pause()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno == errno.EINVAL:  # whoever gave it to us has shut it down
                    self.stop()
                    return
                self._log.warning("no connection can be taken", reason=str(error))
                self._pause()
                self._loop.call_later(PAUSE_SECONDS, self.resume)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opened)

    async def _open(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it left at once, or speaks no TLS
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
            return
        connection.close()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if self._held() + len(self._opening) < self._most:
            self.resume()

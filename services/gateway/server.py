"""The HTTP server: uvicorn's, inside our event loop and without its clock and signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import sys
from collections.abc import Iterator

import structlog
from starlette.types import ASGIApp
from uvicorn import Config, Server

from services.gateway.acceptor import Acceptor
from services.gateway.handles import EXCESS
from services.gateway.http_protocol import BoundedHttpProtocol
from shared.rarely import Rarely
from shared.settings import Settings
from shared.unix_socket import PREFIX, bind_unix

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75  # more than the idle times of clients and balancers, so that they close
ABSENT_SECONDS = 120  # without a sign of the other side's system: then the connection is ended
UNSENT_BYTES = 64 * 1024  # that the system takes from us for a client who takes nothing from it
LAST_WORD_SECONDS = 1.0  # for a request over a connection that is open when we leave
STOP_SECONDS = 1  # for answers still being written when the drain has ended


class HttpServer:
    """Listens from `start` on; its sockets are bound before, to find a taken port at once."""

    def __init__(
        self,
        app: ASGIApp,
        sockets: list[socket.socket],
        max_connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sockets = sockets
        self._max_connections = max_connections
        self._tls = tls
        self._acceptors: list[Acceptor] = []
        self._rarely = Rarely("http")
        self._leaving = False
        for one in sockets:
            _bound_stalls(one)
        config = Config(
            app,
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,  # written by our middleware
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        config.load()
        self._config = config
        self._server = Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._server.servers = []  # it has none to close: the acceptors are ours

    def start(self) -> None:
        # Not `serve`: it installs signal handlers, and wakes ten times a second for the date.
        for listener in self._sockets:
            listener.listen(BACKLOG)
            acceptor = Acceptor(
                listener,
                self._protocol,
                self._tls,
                held=lambda: len(self._server.server_state.connections),
                most=self._max_connections + EXCESS,
            )
            acceptor.start()
            self._acceptors.append(acceptor)

    def _protocol(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(
            self._config,
            self._server.server_state,
            {},
            asyncio.get_running_loop(),
            most=self._max_connections,
            gone=self._make_room,
            rarely=self._rarely,
        )

    def _make_room(self) -> None:
        for acceptor in self._acceptors:
            acceptor.resume()

    @property
    def busy(self) -> bool:
        """Whether any request is being answered, or may be on its way to us who leave."""
        state = self._server.server_state
        return bool(state.tasks) or (self._leaving and bool(state.connections))

    def leave(self) -> None:
        """Leave new connections to others at the same socket; those that are here end in time."""
        self._leaving = True
        for acceptor in self._acceptors:
            acceptor.stop()
        asyncio.get_running_loop().call_later(LAST_WORD_SECONDS, self.close_idle)

    def close_idle(self) -> None:
        """Close connections kept alive; the others close with the answer they are at."""
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        """Stop listening, and end what is still going on."""
        for acceptor in self._acceptors:
            acceptor.close()
        await self._server.shutdown(sockets=self._sockets)


def listening_sockets(settings: Settings) -> list[socket.socket]:
    """The inherited socket, or new ones for `uds`, or host and port; raises OSError."""
    if settings.listen_fd is not None:
        return [socket.socket(fileno=settings.listen_fd)]
    if settings.uds is not None:
        return [bind_unix(settings.uds)]
    found = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for family, _, _, _, address in dict.fromkeys(found):
            port = sockets[0].getsockname()[1] if sockets else settings.port
            try:
                bound = _bound(family, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                    continue  # a name that stands for an address which this machine lacks
                raise
            sockets.append(opened.enter_context(bound))
        opened.pop_all()
    if not sockets:
        raise OSError(errno.EADDRNOTAVAIL, "no such address on this machine")
    return sockets


def _bound(family: int, address: tuple[str | int, ...]) -> socket.socket:
    # asyncio switches Nagle's delay off only where it sees that the protocol is TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _bound_stalls(listener: socket.socket) -> None:
    """Connections inherit these; the system ends those that the other side has forsaken."""
    if listener.family == socket.AF_UNIX:
        return  # both sides are on this machine
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ABSENT_SECONDS // 2)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ABSENT_SECONDS * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def urls(sockets: list[socket.socket], *, secure: bool = False) -> list[str]:
    return [_url(one, "https" if secure else "http") for one in sockets]


def _url(listener: socket.socket, scheme: str) -> str:
    if listener.family == socket.AF_UNIX:
        return f"{PREFIX}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _ToStructlog(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = structlog.get_logger("http")

    def emit(self, record: logging.LogRecord) -> None:
        self._log.log(record.levelno, record.getMessage().strip(), exc_info=record.exc_info)


@contextlib.contextmanager
def uvicorn_logs() -> Iterator[None]:
    """Sends what uvicorn warns of to our log, while it lasts."""
    logger, handler = logging.getLogger("uvicorn.error"), _ToStructlog()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate

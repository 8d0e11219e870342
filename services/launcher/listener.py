"""The HTTP socket: bound before anything heavy starts, and handed to the gateways."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.settings import BadSetting, Settings
from shared.tls import server_context
from shared.unix_socket import PREFIX, bind_unix

BACKLOG = 2048


@contextmanager
def http_listener(settings: Settings) -> Iterator[socket.socket]:
    """A listening socket that children can inherit; raises BadSetting for what is no good."""
    if settings.ssl_certfile is not None and settings.ssl_keyfile is not None:
        _check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    with _bound(settings) as listener:
        listener.set_inheritable(True)
        try:
            yield listener
        finally:
            if settings.uds is not None:
                Path(settings.uds).unlink(missing_ok=True)


def _check_certificate(certfile: str, keyfile: str) -> None:
    try:
        server_context(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise BadSetting(f"--ssl-certfile: {certfile} with {keyfile}: {error}") from None


def _bound(settings: Settings) -> socket.socket:
    if settings.uds is not None:
        return _bound_unix(settings.uds)
    return _bound_tcp(settings.host, settings.port)


def _bound_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadSetting(f"--host: cannot listen on {host}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BadSetting(f"--port: cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def _bound_unix(path: str) -> socket.socket:
    try:
        listener = bind_unix(path)
    except OSError as error:
        raise BadSetting(f"--uds: cannot listen on {path}: {error.strerror or error}") from None
    listener.listen(BACKLOG)
    return listener


def refuse_all(listener: socket.socket) -> None:
    """Have the system refuse new connections, in all processes that share the socket."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)


def base_url(listener: socket.socket, *, secure: bool = False) -> str:
    """Where a client on this machine reaches it."""
    scheme = "https" if secure else "http"
    if listener.family == socket.AF_UNIX:
        return f"{PREFIX}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

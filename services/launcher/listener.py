"""The HTTP socket: bound before anything heavy starts, and handed to the gateways."""

from __future__ import annotations

import socket

from shared.settings import BadSetting

BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket that children can inherit; raises BadSetting if the address is no good."""
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
    listener.set_inheritable(True)
    return listener


def base_url(listener: socket.socket) -> str:
    """Where a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

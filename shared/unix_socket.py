"""HTTP over a unix socket: its address is written `unix:PATH`."""

from __future__ import annotations

import errno
import socket
import stat
from contextlib import suppress
from pathlib import Path

PREFIX = "unix:"


def bind_unix(path: str) -> socket.socket:
    """A bound stream socket; one that its owner left behind is replaced. Raises OSError."""
    if not path:  # which the system would take as a wish for any name of its own
        raise OSError(errno.EINVAL, "the path is empty")
    if _in_use(path):
        raise OSError(errno.EADDRINUSE, "another process listens there")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(Path(path).lstat().st_mode):  # any other file makes `bind` fail
                Path(path).unlink()
        bound.bind(path)
    except OSError:
        bound.close()
        raise
    return bound


def _in_use(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True

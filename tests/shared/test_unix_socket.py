"""Sockets in the file system, and what may be in their place."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared.unix_socket import bind_unix


def test_what_an_owner_left_behind_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    bind_unix(path).close()
    assert Path(path).is_socket()
    with bind_unix(path) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.listen()
        client.connect(path)


def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with bind_unix(path) as listener:
        listener.listen()
        with pytest.raises(OSError, match="another process listens there"):
            bind_unix(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_a_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        bind_unix(str(path))
    assert path.read_text() == "precious"


@pytest.mark.parametrize("path", ["", "/no/such/place/s", "/tmp/" + "long" * 40])
def test_a_path_that_cannot_be(path: str) -> None:
    with pytest.raises(OSError, match=r"empty|No such file|too long"):
        bind_unix(path)

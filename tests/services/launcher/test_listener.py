"""The socket that the launcher hands to the gateways."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from services.launcher.listener import base_url, http_listener
from shared.settings import BadSetting, Settings


def test_tcp() -> None:
    with http_listener(Settings(port=0)) as listener:
        port = listener.getsockname()[1]
        assert base_url(listener) == f"http://127.0.0.1:{port}"
        assert os.get_inheritable(listener.fileno())
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_unix_socket_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with http_listener(Settings(uds=str(path))) as listener:
        assert base_url(listener) == f"unix:{path}"
        assert os.get_inheritable(listener.fileno())
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        with pytest.raises(BadSetting, match=r"--uds: .*another process"):
            http_listener(Settings(uds=str(path))).__enter__()
        assert path.is_socket()
    assert not path.exists()

"""A gateway that answers as the test says, for commands that ask one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.launcher.cli import run


class Gateway(ThreadingHTTPServer):
    """Answers everything with what the test says."""

    status, content = 200, b""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []  # path, authorization
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["authorization"]))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test's output is its own."""


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def complaint(capsys: pytest.CaptureFixture[str], code: int, command: str, *words: str) -> str:
    """The one line that a command fails with."""
    assert run([command, *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headrace {command}: ") and err.count("\n") == 1
    return err

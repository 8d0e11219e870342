"""`headrace trace` when something is wrong: one line says what. (The rest is in tests/e2e.)"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from services.launcher.cli import run
from tests.services.launcher import conftest
from tests.services.launcher.conftest import Gateway

EMPTY = b'{"traceEvents": []}'


def complaint(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    return conftest.complaint(capsys, code, "trace", *words)


def test_what_is_asked_for(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.content = EMPTY
    monkeypatch.setenv("HEADRACE_API_KEY", "first,second")
    assert run(["trace", "--url", f"{gateway.url}/v1/"]) == 0
    assert run(["trace", "--url", gateway.url, "--seconds", "2", "--api-key", "other"]) == 0
    expected = [("/trace?seconds=5.0", "Bearer first"), ("/trace?seconds=2.0", "Bearer other")]
    assert gateway.asked == expected
    assert Path("headrace-trace.json").read_bytes() == EMPTY


def test_without_a_key_none_is_sent(
    gateway: Gateway, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    gateway.content = EMPTY
    assert run(["trace", "--url", gateway.url, "-o", "-"]) == 0
    assert gateway.asked == [("/trace?seconds=5.0", None)]
    assert capfdbinary.readouterr() == (EMPTY, b"")
    assert not list(Path().iterdir())


def test_a_refusal_is_told_in_the_servers_words(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.status = 401
    gateway.content = json.dumps({"error": {"message": "Send a valid API key."}}).encode()
    assert "answered 401, Send a valid API key." in complaint(capsys, 1, "--url", gateway.url)
    gateway.status, gateway.content = 404, b"<html>"
    assert "answered 404, Not Found" in complaint(capsys, 1, "--url", gateway.url)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b"{}", b'{"traceEvents": [1]}'])
def test_what_is_no_trace_is_not_saved(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    gateway.content = content
    assert "no trace" in complaint(capsys, 1, "--url", gateway.url)
    assert not list(Path().iterdir())


def test_a_file_that_cannot_be_written(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.content = EMPTY
    line = complaint(capsys, 1, "--url", gateway.url, "-o", "no/such/place")
    assert line == "headrace trace: cannot write no/such/place: No such file or directory\n"


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        line = complaint(capsys, 1, "--url", url)
    assert line == f"headrace trace: {url} does not answer: Connection refused\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, ["--url", "file:///etc/passwd"]),
        (2, ["--url", "localhost:8000"]),
        (2, ["--seconds", "many"]),
        (2, ["--minutes", "1"]),
        (2, ["trace.json"]),
        (1, ["--url", "http://127.0.0.1:port"]),
        (1, ["--url", "http://127.0.0.1:1", "--api-key", "two\nlines"]),
    ],
)
def test_flags_that_mean_nothing(
    capsys: pytest.CaptureFixture[str], code: int, words: list[str]
) -> None:
    complaint(capsys, code, *words)

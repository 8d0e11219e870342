"""`headrace status`: the table, and one line if there is none to show."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from services.launcher.cli import run
from tests.services.launcher.conftest import Gateway, complaint

SCHEDULER = {
    "service": "scheduler",
    "name": "scheduler.0",
    "state": "ready",
    "incarnation": "00000000000000ff",
    "host": "mill",
    "pid": 4711,
    "age": 7384.2,
    "load": {"running": 3, "waiting": 12, "slots": 64, "kv_cache_usage": 0.4567, "tokens": 1234567},
}
SILENT = {"service": "tokenizer", "name": "10.0.0.7:7102", "state": "silent"}


def status(**changes: Any) -> bytes:
    whole = {
        "model": "smol",
        "version": "0.1",
        "mesh": "ipc:/run/mesh",
        "missing": [],
        "instances": [SCHEDULER, SILENT],
    }
    return json.dumps(whole | changes).encode()


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The words of each line."""
    assert run(["status", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line.split() for line in out.splitlines()]


def test_a_line_for_each_instance(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.content = status()
    head, _, scheduler, silent = shown(capsys, gateway.url)
    assert head[-2:] == ["mesh", "ipc:/run/mesh"]
    assert scheduler[:3] == ["scheduler.0", "ready", "2h"]
    assert scheduler[3:9] == ["3m", "4711", "on", "mill", "3", "12"]
    assert scheduler[9:] == ["slots", "64", "kv_cache_usage", "0.457", "tokens", "1234567"]
    assert silent == ["tokenizer", "10.0.0.7:7102", "silent"]
    assert gateway.asked == [("/status", None)]


def test_what_is_missing(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.content = status(missing=["detokenizer"])
    assert shown(capsys, gateway.url)[-1] == ["missing:", "detokenizer"]


def test_what_others_say_is_text_and_no_markup(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.content = status(instances=[SCHEDULER | {"host": "[bold]mill[/]"}], model="[red]")
    out = shown(capsys, gateway.url)
    assert out[0][0] == "[red]," and "[bold]mill[/]" in out[2]


def test_json_is_what_the_gateway_says(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "first,second")
    gateway.content = status()
    assert run(["status", "--json", f"{gateway.url}/v1/"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(status())
    assert gateway.asked == [("/status", "Bearer first")]


def test_watching_shows_what_has_changed(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = SCHEDULER | {"load": SCHEDULER["load"] | {"tokens": 1235567}}  # type: ignore[operator]
    another = later | {"incarnation": "1"}
    lives = iter([later, another])

    def pause(seconds: float) -> None:
        assert seconds == 0.5
        if (instance := next(lives, None)) is None:
            raise KeyboardInterrupt
        gateway.content = status(instances=[instance])

    monkeypatch.setattr("time.sleep", pause)
    gateway.content = status()
    first, second, third = (
        line for line in shown(capsys, gateway.url, "--watch", "0.5") if "tokens" in line
    )
    assert "tokens/s" not in first and "tokens/s" not in third
    assert float(second[second.index("tokens/s") + 1]) > 0


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b"{}", status(instances=[{}])])
def test_what_is_no_status(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    gateway.content = content
    assert "no status" in complaint(capsys, 1, "status", gateway.url)


def test_a_refusal_is_told_in_the_servers_words(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.status = 401
    gateway.content = json.dumps({"error": {"message": "Send a valid API key."}}).encode()
    line = complaint(capsys, 1, "status", gateway.url)
    assert "answered 401, Send a valid API key." in line


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        line = complaint(capsys, 1, "status", url)
    assert line == f"headrace status: {url} does not answer: Connection refused\n"


@pytest.mark.parametrize("words", [["localhost:8000"], ["--watch", "often"], ["--loud"]])
def test_flags_that_mean_nothing(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    complaint(capsys, 2, "status", *words)

"""`headrace batch` against a scripted server: what is asked, what is written, what it ends with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from services.batch.flags import parse_flags
from services.launcher.cli import run
from tests.services.batch.conftest import ScriptedServer, completion, echo


def line(custom_id: str, prompt: str = "x", **more: Any) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return json.dumps({**request, "body": {"prompt": prompt}, **more})


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    return tmp_path


def batch(server: ScriptedServer, lines: Iterable[str], *words: str) -> int:
    Path("in").write_text("\n".join(lines))
    return run(["batch", "in", "-o", "out", "--url", server.url, *words])


def test_each_line_has_its_result(
    here: Path, server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """R124"""
    lines = [
        line("a", "first"),
        line("b", url="/v1/nothing"),
        "{bad",
        "",
        line("a", "again"),
        "   ",
        line("c", "last"),
    ]
    assert batch(server, lines) == 1
    found = results(Path("out"))
    by_id = {(one["custom_id"], one["error"] and one["error"]["line"]): one for one in found}
    assert by_id.keys() == {("a", None), ("b", 2), (None, 3), ("a", 5), ("c", None)}
    assert by_id["c", None]["response"]["body"]["choices"][0]["text"] == "<last>"
    assert by_id["b", 2]["response"]["status_code"] == 404
    assert by_id["a", 5]["error"]["code"] == "duplicate_custom_id"
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "headrace batch: 2 answered, 3 failed, 2 empty lines\n"


def test_all_well(here: Path, server: ScriptedServer) -> None:
    async def slow(body: dict[str, Any]) -> web.Response:
        await server.pause(0.005)
        return await echo(body)

    server.act = slow
    assert batch(server, [line(str(number)) for number in range(50)], "--window", "7") == 0
    assert {one["custom_id"] for one in results(Path("out"))} == set(map(str, range(50)))
    assert 1 < server.most <= 7


def test_a_second_run_asks_only_for_what_is_missing(
    here: Path, server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    async def picky(body: dict[str, Any]) -> web.Response:
        if body["prompt"] == "hard":
            return web.json_response({"error": {"message": "no"}}, status=500)
        return await echo(body)

    server.act = picky
    lines = [line("a"), line("b", "hard"), "{bad", line("c")]
    assert batch(server, lines) == 1
    server.act = echo
    server.bodies.clear()
    assert batch(server, [*lines, line("d", "new")]) == 1
    assert sorted(body["prompt"] for body in server.bodies) == ["hard", "new"]
    found = [one["custom_id"] for one in results(Path("out"))]
    assert sorted(found, key=str) == [None, "a", "b", "c", "d"]
    assert "2 answered, 1 failed, 2 answered before" in capfd.readouterr().err


def test_standard_streams(here: Path, server: ScriptedServer) -> None:
    command = [sys.executable, "-m", "services.launcher", "batch", "-", "-o", "-"]
    ended = subprocess.run(
        [*command, "--url", server.url],
        input=f"{line('a')}\n{line('b')}".encode(),
        capture_output=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    assert ended.returncode == 0
    assert {json.loads(one)["custom_id"] for one in ended.stdout.splitlines()} == {"a", "b"}
    assert ended.stderr == b"headrace batch: 2 answered, 0 failed\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_whole_lines_and_closes_connections(
    here: Path, server: ScriptedServer, number: signal.Signals, code: int
) -> None:
    async def slow(body: dict[str, Any]) -> web.Response:
        if body["prompt"] == "slow":
            await server.forever()
        return completion("x" * 1000)

    server.act = slow
    lines = [line(str(one), "slow" if one % 3 else "quick") for one in range(30)]
    Path("in").write_text("\n".join(lines))
    command = [sys.executable, "-m", "services.launcher", "batch", str(here / "in")]
    process = subprocess.Popen(
        [*command, "-o", str(here / "out"), "--url", server.url],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
    )
    server.wait_until(lambda: server.running == 20 and Path("out").read_bytes().count(b"\n") == 10)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.endswith("the same command goes on from here\n")
    assert len(err.splitlines()) == 1
    assert len(results(Path("out"))) == 10
    server.wait_until(lambda: not server.running)
    assert server.left == 20


def test_results_come_as_they_are_and_input_is_read_as_there_is_room(
    here: Path, server: ScriptedServer
) -> None:
    """A program that feeds one line at a time gets each answer before it sends the next."""
    command = [sys.executable, "-m", "services.launcher", "batch", "-", "-o", "-"]
    with subprocess.Popen(
        [*command, "--url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(3):
            process.stdin.write(line(str(number)) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["custom_id"] == str(number)
        process.stdin.close()
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["in"], 2, "-o/--output"),
        (["in", "-o", "in"], 2, "in is both input and output"),
        (["none", "-o", "out"], 2, "cannot read none: No such file"),
        (["in", "-o", "no/out"], 2, "cannot write no/out: No such file"),
        (["in", "-o", "out", "--window", "0"], 2, "--window: '0' is no whole number from 1 on"),
        (["in", "-o", "out", "--url", "x"], 2, "--url: 'x' is no http address"),
        (["in", "-o", "out", "--url", "http://x", "--dtype", "float32"], 2, "--dtype: is for"),
        (["in", "-o", "out", "--dtype", "float8"], 2, "--dtype: 'float8' is none of"),
        (["in", "-o", "out", "--port", "1"], 2, "unrecognized arguments: --port"),
        (["in", "-o", "out", "--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1 does not"),
    ],
)
def test_one_clear_line(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, reason: str
) -> None:
    Path("in").write_text(line("a"))
    assert run(["batch", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace batch: ")
    assert reason in err
    assert len(err.splitlines()) == 1


def test_a_wrong_key_writes_no_results(here: Path, server: ScriptedServer) -> None:
    assert batch(server, [line("a")], "--api-key", "wrong") == 1
    assert results(Path("out")) == []


def test_a_full_disk_ends_it(
    here: Path, server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("in").write_text(line("a"))
    assert run(["batch", "in", "-o", "/dev/full", "--url", server.url]) == 1
    assert capfd.readouterr().err == (
        "headrace batch: cannot write /dev/full: No space left on device\n"
    )


def test_flags_of_serve_are_handed_on_as_they_are() -> None:
    words = ["--model", "m", "-o", "out", "--max-num-seqs=7", "--no-enable-prefix-caching", "in"]
    given = parse_flags(words)
    assert given.input == "in"
    assert given.serve == ["--model=m", "--max-num-seqs=7", "--no-enable-prefix-caching"]


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "first,second")
    assert parse_flags(["in", "-o", "out", "--url", "http://x"]).api_key == "first"


def test_a_model_that_is_none(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text(line("a"))
    assert run(["batch", "in", "-o", "out", "--model", "/no/such", "--device", "simulated"]) == 2
    err = capfd.readouterr().err.splitlines()
    assert len(err) == 2
    assert err[0].startswith("headrace serve: '/no/such' is neither")
    assert err[1].startswith("headrace batch: the mesh ended with code 2")

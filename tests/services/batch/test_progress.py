"""The bar: where it is shown, and what it ends with."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from services.batch.client import Answer
from services.batch.progress import Progress

PROGRAM = """
import sys
from services.batch.client import Answer
from services.batch.progress import Progress

with Progress({total}, {shown}) as progress:
    for status in {statuses}:
        print("said by the program")
        progress.ended(Answer(status, "", {{"usage": {{"completion_tokens": 30}}}}))
    progress.skip()
    progress.finish()
"""


def run(total: int | None, statuses: list[int], shown: bool | None = None) -> tuple[str, str]:
    """Standard output, and what a terminal gets as standard error."""
    program = PROGRAM.format(total=total, shown=shown, statuses=statuses)
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        env=os.environ | {"COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            piece = os.read(controller, 4096)
        except OSError:  # how a terminal says that the other side is closed
            break
        if not piece:
            break
        seen += piece
    output, _ = process.communicate()
    assert process.returncode == 0
    os.close(controller)
    return output, seen.decode()


def last_line(seen: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()][-1]


@pytest.mark.parametrize("total", [5, None])
def test_it_ends_at_100_percent_and_standard_output_is_the_programs(total: int | None) -> None:
    """R125"""
    output, seen = run(total, [200, 400, 200, 200])
    line = last_line(seen)
    assert line.startswith("requests ")
    assert "100% 5/5, 1 failed, " in line
    assert "tokens/s" in line
    assert output == "said by the program\n" * 4


def test_it_can_be_switched_off() -> None:
    assert run(2, [200], shown=False) == ("said by the program\n", "")


def test_none_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(1) as progress:
        progress.ended(Answer(200, "", {}))
        progress.finish()
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_its_end_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(0, True) as progress:
        progress.finish()
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("requests ")
    assert "100% 0/0, 0 tokens/s" in line

"""Processes that hang end by themselves, however they hang."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, re, sys, time
from shared import watchdog
from shared.logs import configure_logs
configure_logs("info", "json", "tokenizer", 0)
watchdog.BEAT_SECONDS = 0.01
at = iter(range(10**9))

async def main(silence, standstill, what):
    watchdog.Watchdog(silence, standstill, lambda: 7 if what == "stand" else next(at))
    await asyncio.sleep(0.1)
    if what == "sleep":
        time.sleep(600)
    if what == "compute":
        re.match("(a+)+b", 64 * "a")  # never gives the interpreter's lock away
    if what == "stand":
        await asyncio.sleep(600)
    if what == "turn":
        await asyncio.sleep(6)

asyncio.run(main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
"""


def run(silence: float, standstill: float, what: str) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, str(silence), str(standstill), what]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("what", ["sleep", "compute"])
def test_a_loop_that_does_not_turn_ends_the_process(what: str) -> None:
    code, told = run(0.5, 0, what)
    assert code == 1
    assert "Timeout" in told and "in main" in told  # where it was


def test_an_iteration_that_does_not_end_ends_the_process() -> None:
    code, told = run(0, 0.5, "stand")
    assert code == 1
    assert "one iteration takes longer than 0.5 s" in told and "in _look" in told


def test_what_turns_and_moves_is_left_alone() -> None:
    assert run(5, 5, "turn") == (0, "")

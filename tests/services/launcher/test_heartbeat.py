"""What counts as hung, and that it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.launcher import heartbeat as module
from services.launcher.heartbeat import Heartbeat
from services.launcher.instance import Inheritance, Instance
from shared import pulse
from shared.pulse import BEAT, Pulse
from shared.settings import Settings
from shared.types import ServiceName
from tests.conftest import until

PROGRAM = """
import asyncio, os, sys
from shared import pulse
pulse.BEAT_SECONDS = 0.01
async def main():
    pulse.Pulse(int(os.environ[pulse.PULSE_VARIABLE]), iter(range(10**9)).__next__)
    open(os.environ["BEGUN"], "w").close()
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@asynccontextmanager
async def beating(silence: float, standstill: float) -> AsyncIterator[tuple[Heartbeat, int]]:
    """A heartbeat, and the writing end of its pipe."""
    one = Heartbeat(silence, standstill)
    writer = os.dup(one.writer)
    one.started()
    try:
        yield one, writer
    finally:
        os.close(writer)
        one.close()


async def test_silence_counts_from_the_last_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    async with beating(0.2, 0) as (heart, writer):
        assert heart.problem is None  # it has time to start
        assert heart.look_again == 0.2
        os.write(writer, BEAT.pack(1) + BEAT.pack(2))
        await until(lambda: heart.problem == "no sign of life for 0.2 s")
        os.write(writer, BEAT.pack(2))
        await until(lambda: heart.problem is None)


async def test_beats_that_count_the_same_are_a_standstill() -> None:
    async with beating(100, 0.2) as (heart, writer):
        for _ in range(2):
            os.write(writer, BEAT.pack(5))
            await asyncio.sleep(0)
        await until(lambda: heart.problem == "one iteration takes longer than 0.2 s")
        os.write(writer, BEAT.pack(6))
        await until(lambda: heart.problem is None)


async def test_a_child_that_never_begins_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.05)
    async with beating(0.05, 0) as (heart, _):
        await until(lambda: heart.problem is not None)


async def test_without_limits_nothing_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", -100.0)
    async with beating(0, 0) as (heart, _):
        assert (heart.problem, heart.look_again) == (None, None)


async def test_a_pulse_beats_and_survives_a_full_or_broken_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.001)
    counts = iter(range(100_000))
    reader, writer = os.pipe()
    Pulse(writer, lambda: next(counts))
    await until(lambda: next(counts) > 3)
    assert BEAT.unpack(os.read(reader, BEAT.size)) == (0,)
    while True:  # fill it
        try:
            os.write(writer, bytes(65536))
        except BlockingIOError:
            break
    at = next(counts)
    await until(lambda: next(counts) > at + 3)
    os.close(reader)
    at = next(counts)
    await until(lambda: next(counts) > at + 3)
    os.close(writer)


class Sleeper(Instance):
    """A process that only beats."""

    @property
    def _command(self) -> Sequence[str]:
        return [sys.executable, "-c", PROGRAM]


async def test_a_process_that_stops_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    monkeypatch.setenv("BEGUN", str(begun))
    settings = Settings(hang_timeout=2, iteration_timeout=0)
    lifeline, held = os.pipe()
    one = Sleeper(ServiceName.SCHEDULER, 0, Inheritance(settings, lifeline, lifeline))
    with capture_logs() as logs:
        living = asyncio.create_task(one.live())
        await until(begun.exists)
        assert one._process is not None
        one._process.send_signal(signal.SIGSTOP)
        assert await living == -signal.SIGKILL
    (log,) = [log for log in logs if log["log_level"] == "error"]
    assert log["reason"] == "no sign of life for 2 s"
    os.close(lifeline)
    os.close(held)

"""How a service lives and ends, as the processes that it will be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.codec import Identity, encode
from shared.messages import (
    Abort,
    MetricsReply,
    MetricsRequest,
    Status,
    StatusReply,
    StatusRequest,
)
from shared.service import LIFELINE_VARIABLE
from shared.types import Incarnation, RequestId, ServiceName, State
from tests.shared.mesh_member import PATIENCE, IpcMembers, Member, raw_push, until

ROOT = Path(__file__).parents[2]
GATEWAY, TOKENIZER = ServiceName.GATEWAY, ServiceName.TOKENIZER
NAME = "tokenizer.0"


class Tiny:
    """The tiny service as a process, and a gateway that can join it."""

    def __init__(self, process: Process, socket: Path, gateway: Member) -> None:
        self.process = process
        self.socket = socket
        self.gateway = gateway
        self._exits = AsyncExitStack()

    def tell(self, *commands: str) -> None:
        for command in commands:
            assert self.gateway.mesh.send(TOKENIZER, NAME, Abort(RequestId(command), ""))

    async def join(self) -> None:
        """The gateway joins, as soon as there is whom to join."""
        await until(self.socket.exists)
        await self._exits.enter_async_context(self.gateway.present())

    async def linked(self) -> None:
        """The gateway joins; returns when each hears the other."""
        await self.join()
        await until(lambda: self.gateway.mesh.peers(TOKENIZER))
        while not self.gateway.heard:
            self.tell("hello?")
            await asyncio.sleep(0.01)

    async def obeys(self, command: str) -> None:
        """Tell it, and wait for the echo."""
        before = len(self.gateway.heard)
        self.tell(command)
        await until(lambda: command in self.gateway.heard[before:])

    async def drains(self, number: signal.Signals) -> None:
        """Send it a first signal, and wait until it drains."""
        self.process.send_signal(number)
        await until(lambda: "draining" in self.gateway.heard)

    async def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Its exit code and its log, which holds nothing but JSON."""
        async with asyncio.timeout(PATIENCE):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, [json.loads(line) for line in errors.splitlines()]

    async def leave(self) -> None:
        """The gateway goes."""
        await self._exits.aclose()


def command_line(*flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.shared.tiny_service", *flags]


class Start:
    """Starts the tiny service in the mesh of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / f"{NAME}.sock"

    @asynccontextmanager
    async def __call__(
        self, *flags: str, pass_fds: tuple[int, ...] = (), **environment: str
    ) -> AsyncIterator[Tiny]:
        process = await asyncio.create_subprocess_exec(
            *command_line(f"--mesh=ipc:{self.directory}", "--log-format=json", *flags),
            cwd=ROOT,
            env=os.environ | environment,
            stderr=PIPE,
            pass_fds=pass_fds,
        )
        tiny = Tiny(process, self.socket, IpcMembers(self.directory)(GATEWAY, TOKENIZER))
        try:
            yield tiny
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
            await tiny.leave()


@pytest.fixture
def start(run_directory: Path) -> Start:
    return Start(run_directory)


def errors_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in log if line["level"] == "error"]


async def test_an_idle_service_ends_soon(start: Start) -> None:
    async with start() as tiny:
        await tiny.linked()
        assert start.socket.exists()
        tiny.process.send_signal(signal.SIGTERM)
        code, log = await tiny.end()
        assert code == 0
        assert not start.socket.exists()
    assert next(line["event"] for line in log if line["level"] == "info") == "started"
    assert {(line["service"], line["index"]) for line in log} == {("tokenizer", 0)}


async def test_a_busy_service_finishes_its_work_first(start: Start) -> None:
    async with start() as tiny:
        await tiny.linked()
        await tiny.obeys("busy")
        await tiny.drains(signal.SIGTERM)
        for _ in range(3):
            await tiny.obeys("still there")
        tiny.tell("free")
        assert (await tiny.end())[0] == 0


async def test_a_service_that_drains_is_given_nothing_new_and_does_what_comes(start: Start) -> None:
    async with start() as tiny:
        await tiny.linked()
        await tiny.obeys("busy")
        await tiny.drains(signal.SIGTERM)
        assert ("leaving", NAME) in tiny.gateway.events
        assert tiny.gateway.mesh.peers(TOKENIZER) == []
        tiny.tell("free", "what was on its way")
        await until(lambda: "what was on its way" in tiny.gateway.heard)
        assert (await tiny.end())[0] == 0


async def test_a_drain_has_its_limit(start: Start) -> None:
    async with start("--drain-timeout=0.2") as tiny:
        await tiny.linked()
        await tiny.obeys("busy")
        tiny.process.send_signal(signal.SIGTERM)
        assert (await tiny.end())[0] == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
    ],
)
async def test_a_second_signal_ends_it_at_once(
    start: Start, first: signal.Signals, second: signal.Signals
) -> None:
    async with start() as tiny:
        await tiny.linked()
        await tiny.obeys("busy")
        await tiny.drains(first)
        tiny.process.send_signal(second)
        assert (await tiny.end())[0] == 128 + second


@pytest.mark.parametrize("fault", ["", "slow start"])
async def test_no_thread_holds_up_the_end(start: Start, fault: str) -> None:
    async with start(TINY_FAULT=fault) as tiny:
        await tiny.linked()
        await tiny.obeys("compute")
        tiny.process.send_signal(signal.SIGTERM)
        assert (await tiny.end())[0] == 0


async def test_one_that_hangs_and_has_no_launcher_ends_by_itself(start: Start) -> None:
    async with start("--hang-timeout=5") as tiny:
        await tiny.linked()
        tiny.tell("hang")
        async with asyncio.timeout(PATIENCE):
            _, errors = await tiny.process.communicate()
    assert tiny.process.returncode == 1
    assert b"Timeout" in errors and b"in handle" in errors  # where it hung


async def test_an_orphan_ends_and_cleans_up(run_directory: Path) -> None:
    lifeline, held = os.pipe()
    directory = run_directory / "mesh"
    directory.mkdir()
    environment = {LIFELINE_VARIABLE: str(lifeline)}
    async with Start(directory)(pass_fds=(lifeline,), **environment) as tiny:
        os.close(lifeline)
        await tiny.linked()
        await tiny.obeys("busy")
        os.close(held)
        assert (await tiny.end())[0] == 1
        assert not directory.exists()


@pytest.mark.parametrize("fault", ["handle", "task", "callback"])
async def test_a_fault_ends_the_service_with_one_error(start: Start, fault: str) -> None:
    async with start() as tiny:
        await tiny.linked()
        tiny.tell(*[fault] * (100 if fault == "handle" else 1))
        code, log = await tiny.end()
    assert code == 1
    (error,) = errors_of(log)
    assert f"Fault: {fault}" in error["exception"]


@pytest.mark.parametrize("fault", ["init", "start", "joined", "lost", "stop"])
async def test_a_fault_at_any_time_ends_the_service_with_one_error(
    start: Start, fault: str
) -> None:
    async with start(TINY_FAULT=fault) as tiny:
        if fault == "joined":
            await tiny.join()
        if fault in ("lost", "stop"):
            await tiny.linked()
        if fault == "lost":
            await tiny.leave()
        if fault == "stop":
            tiny.process.send_signal(signal.SIGTERM)
        code, log = await tiny.end()
    assert code == 1
    (error,) = errors_of(log)
    assert f"Fault: {fault}" in error["exception"]


async def test_what_its_user_can_mend_is_one_line(start: Start) -> None:
    async with start(TINY_FAULT="setting") as tiny:
        code, log = await tiny.end()
    assert code == 2
    (error,) = errors_of(log)
    assert error["reason"] == "the model is made of cheese"
    assert "exception" not in error


async def test_metrics_are_answered(start: Start) -> None:
    async with start() as tiny:
        await tiny.linked()
        tiny.gateway.mesh.send(TOKENIZER, NAME, MetricsRequest(RequestId("m")))
        await until(lambda: tiny.gateway.answers)
    (reply,) = tiny.gateway.answers
    assert isinstance(reply, MetricsReply) and reply.request_id == "m"
    families = {f.name: f for f in text_string_to_metric_families(reply.exposition)}
    cpu = families["headrace_process_cpu_seconds"].samples[0]
    assert cpu.labels == {"service": "tokenizer", "instance": NAME}
    assert cpu.value > 0
    assert families["headrace_process_open_fds"].samples[0].value > 3
    assert families["headrace_process_resident_memory_bytes"].samples[0].value > 1e6


async def test_the_status_follows_its_life(start: Start) -> None:
    async with start() as tiny:
        await tiny.linked()
        await tiny.obeys("busy")
        ready = await status_of(tiny)
        await tiny.drains(signal.SIGTERM)
        leaving = await status_of(tiny)
        tiny.tell("free")
        await tiny.end()
    assert (ready.state, leaving.state) == (State.READY, State.LEAVING)
    assert ready.pid == leaving.pid == tiny.process.pid
    assert ready.host == leaving.host == socket.gethostname()
    assert 0 < ready.age < leaving.age < PATIENCE
    load = {figure.name: figure.value for figure in leaving.load}
    assert load.keys() == {"inbox_peak", "undelivered"} and load["inbox_peak"] >= 1


async def status_of(tiny: Tiny) -> Status:
    before = len(tiny.gateway.answers)
    tiny.gateway.mesh.send(TOKENIZER, NAME, StatusRequest(RequestId("s")))
    await until(lambda: len(tiny.gateway.answers) > before)
    reply = tiny.gateway.answers[-1]
    assert isinstance(reply, StatusReply)
    return reply.status


async def test_questions_of_those_it_does_not_talk_to_do_no_harm(start: Start) -> None:
    async with start() as tiny:
        await tiny.linked()
        stranger = Identity(ServiceName.SCHEDULER, "scheduler.0", Incarnation(1))
        with raw_push(start.directory, NAME) as push:
            push.send(encode(MetricsRequest(RequestId("m")), stranger))
            await asyncio.sleep(0.1)
        await tiny.obeys("still there")


async def test_a_killed_service_can_start_again(start: Start) -> None:
    async with start() as tiny:
        await tiny.linked()
        tiny.process.kill()
        await tiny.end()
        assert start.socket.exists()
    async with start() as tiny:
        await tiny.linked()


async def test_a_taken_inbox_is_refused_and_its_owner_unharmed(start: Start) -> None:
    async with start() as tiny:
        await tiny.linked()
        code, line = run_to_end(f"--mesh=ipc:{start.directory}")
        assert (code, line) == (
            2,
            f"headrace tokenizer: cannot bind ipc://{start.socket}: Address already in use",
        )
        assert start.socket.exists()
        await tiny.obeys("still there")


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        mesh = f"--mesh=static:tokenizer=127.0.0.1:{port}"
        code, line = run_to_end(mesh, f"--mesh-port={port}", "--allow-plain-tcp")
    assert code == 2
    assert f"cannot bind tcp://127.0.0.1:{port}: Address already in use" in line


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--quantum"], "unrecognized arguments: --quantum"),
        (["--index=-1"], "--index: -1 is less than 0"),
        (["--mesh=ipc:/no/such/directory"], "--mesh: no directory /no/such/directory"),
        ([], "--mesh: give ipc:DIRECTORY, dns or static:SERVICE=HOST:PORT,..."),
    ],
)
def test_a_mistake_in_the_settings_is_one_line(flags: list[str], reason: str) -> None:
    assert run_to_end(*flags) == (2, f"headrace tokenizer: {reason}")


def run_to_end(*flags: str) -> tuple[int, str]:
    """The exit code and the one line on standard error."""
    ended = subprocess.run(
        command_line(*flags), cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
    )
    (line,) = ended.stderr.splitlines()
    return ended.returncode, line


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "scheduler", "detokenizer"])
def test_light_services_do_without_the_heavy_packages(service: str) -> None:
    program = (
        f"import sys, services.{service}.service\n"
        "heavy = {'torch', 'transformers', 'triton'} & sys.modules.keys()\n"
        "sys.exit(' '.join(sorted(heavy)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)

"""Meshes for the tests, on the loop that services run on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import uvloop

from shared.types import ServiceName
from tests.shared.mesh_member import IpcMembers, TcpMembers


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """A directory with room for the names of sockets; `tmp_path` can be too long."""
    with TemporaryDirectory(prefix="headrace-") as directory:
        yield Path(directory)


@pytest.fixture
def ipc_members(run_directory: Path) -> IpcMembers:
    return IpcMembers(run_directory)


@pytest.fixture
def tcp_members() -> TcpMembers:
    """Two instances of each service can be made."""
    with ExitStack() as held:
        ports = {service: [_free_port(held) for _ in range(2)] for service in ServiceName}
    return TcpMembers(ports)


@pytest.fixture(params=["ipc", "tcp"])
def members(request: pytest.FixtureRequest) -> IpcMembers | TcpMembers:
    made: IpcMembers | TcpMembers = request.getfixturevalue(f"{request.param}_members")
    return made


def _free_port(held: ExitStack) -> int:
    """A port that is free as soon as `held` is closed."""
    listener = held.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    return port

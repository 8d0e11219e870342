"""Where the server listens, and what it says when it cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.server import listening_sockets, urls
from services.gateway.service import GatewayService
from shared.mesh import Mesh, MeshAddress
from shared.service import StartError
from shared.settings import Settings
from shared.types import ServiceName
from tests.services.gateway.scripted_mesh import ScriptedMesh

HAS_IPV6 = socket.has_ipv6 and Path("/proc/net/if_inet6").exists()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")


@contextmanager
def listening(**settings: Any) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        sockets = listening_sockets(Settings(port=0, **settings))
        for one in sockets:
            stack.enter_context(one)
        yield sockets


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("0.0.0.0", "http://0.0.0.0:"),
        pytest.param("::1", "http://[::1]:", marks=needs_ipv6),
        pytest.param("::", "http://[::]:", marks=needs_ipv6),
    ],
)
def test_addresses(host: str, url: str) -> None:
    with listening(host=host) as sockets:
        assert [one.startswith(url) for one in urls(sockets)] == [True]


def test_a_name_stands_for_all_its_addresses_on_one_port() -> None:
    with listening(host="localhost") as sockets:
        assert sockets
        assert len({one.getsockname()[1] for one in sockets}) == 1


def test_an_inherited_socket_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as parent:
        port = parent.getsockname()[1]
        with listening(listen_fd=parent.detach()) as sockets:
            assert [one.getsockname()[1] for one in sockets] == [port]


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6), "localhost"])
async def test_requests_reach_it(mesh: ScriptedMesh, tiny_model: Path, host: str) -> None:
    await mesh.start_gateway(tiny_model, host=host)
    async with httpx.AsyncClient() as client:
        for url in mesh.gateways[0].urls:
            assert (await client.get(f"{url}/health")).status_code == 200


async def test_requests_reach_a_unix_socket(
    mesh: ScriptedMesh, tiny_model: Path, tmp_path: Path
) -> None:
    path = str(tmp_path / "http.sock")
    await mesh.start_gateway(tiny_model, uds=path)
    assert mesh.gateways[0].urls == [f"unix:{path}"]
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/health")).status_code == 200


async def test_a_taken_unix_socket_is_one_clear_line(
    mesh: ScriptedMesh, tiny_model: Path, tmp_path: Path
) -> None:
    path = str(tmp_path / "http.sock")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(path)
        taken.listen()
        with pytest.raises(StartError, match=f"cannot listen on {path}: another process"):
            await start(mesh, model=str(tiny_model), uds=path)


async def start(mesh: ScriptedMesh, **settings: Any) -> None:
    own = Settings(mesh=f"ipc:{mesh.directory}", **settings)
    address = MeshAddress.from_settings(ServiceName.GATEWAY, own)
    gateway = GatewayService(own, Mesh(ServiceName.GATEWAY, address, []))
    try:
        await gateway.start()
    finally:
        await gateway.stop()


async def test_a_taken_port_is_one_clear_line(mesh: ScriptedMesh, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
            await start(mesh, model=str(tiny_model), port=port)


async def test_a_bad_model_is_one_clear_line(mesh: ScriptedMesh, tiny_model: Path) -> None:
    with pytest.raises(StartError, match="max-model-len"):
        await start(mesh, model=str(tiny_model), port=0, max_model_len=100_000)

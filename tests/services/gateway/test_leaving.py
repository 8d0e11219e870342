"""Instances that leave: what is new goes to others, or waits for them; what was begun goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import launches, service
from services.gateway.service import GatewayService
from shared.messages import Abort, Encode, Encoded, Generate
from shared.types import ServiceName, int32s
from tests.services.gateway.scripted_mesh import (
    CREDIT,
    Peer,
    ScriptedMesh,
    background,
    until,
    wait_ready,
)

TOKENIZER, SCHEDULER, DETOKENIZER = (
    ServiceName.TOKENIZER,
    ServiceName.SCHEDULER,
    ServiceName.DETOKENIZER,
)
CHOSEN = (TOKENIZER, SCHEDULER, DETOKENIZER)


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, **body})


async def withdraw(mesh: ScriptedMesh, peer: Peer) -> None:
    """Have it leave, and the gateway hear of that."""
    identity = peer.mesh.identity
    peer.mesh.withdraw()
    await until(lambda: identity.name not in mesh.gateways[0].mesh.peers(identity.service))


async def join(mesh: ScriptedMesh, service: ServiceName) -> Peer:
    peer = await mesh.start(service, index=1)
    await mesh.met(peer)
    return peer


async def test_a_tokenizer_that_leaves_gets_nothing_new(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    stays = await join(mesh, TOKENIZER)
    await withdraw(mesh, mesh.tokenizer)
    for _ in range(3):
        async with background(complete(client)) as answering:
            mesh.answer(await stays.hear(Generate))
            assert (await answering).status_code == 200
    async with background(client.post("/tokenize", json={"prompt": "a"})) as answering:
        asked = await stays.hear(Encode)
        stays.tell(Encoded(asked.request_id, int32s([1]), 9))
        assert (await answering).json()["count"] == 1


async def test_a_detokenizer_that_leaves_is_on_no_new_route(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(complete(client, stream=True)) as answering:
        begun = await mesh.tokenizer.hear(Generate)
        assert begun.route.detokenizer == "detokenizer.0"
        mesh.accept(begun)
        stays = await join(mesh, DETOKENIZER)
        await withdraw(mesh, mesh.detokenizer)
        for _ in range(4):
            async with background(complete(client)):
                route = (await mesh.tokenizer.hear(Generate)).route
                assert route.detokenizer == stays.mesh.identity.name
        mesh.answer(begun)
        assert (await answering).status_code == 200


@pytest.mark.parametrize("service", CHOSEN)
async def test_if_the_only_one_leaves_requests_wait_for_the_next(
    mesh: ScriptedMesh,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    service: ServiceName,
) -> None:
    """And do not lose patience before it is gone."""
    monkeypatch.setattr(launches, "WAIT_SECONDS", 0.05)
    leaves = {peer.mesh.identity.service: peer for peer in mesh.peers}[service]
    await withdraw(mesh, leaves)
    async with background(complete(client)) as answering:
        await until(lambda: mesh.gateways[0].load["waiting"] == 1)
        await asyncio.sleep(4 * launches.WAIT_SECONDS)
        assert not answering.done()
        mesh.adopt(await join(mesh, service))
        if service is SCHEDULER:
            mesh.scheduler.tell(CREDIT)
        mesh.answer(await mesh.tokenizer.hear(Generate))
        assert (await answering).status_code == 200
    assert (await client.get("/health")).json()["missing"] == []


@pytest.mark.parametrize("service", CHOSEN)
async def test_they_do_not_wait_for_ever(
    mesh: ScriptedMesh,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    service: ServiceName,
) -> None:
    leaves = {peer.mesh.identity.service: peer for peer in mesh.peers}[service]
    await withdraw(mesh, leaves)
    monkeypatch.setattr(launches, "WAIT_SECONDS", 0.05)
    async with background(complete(client)) as answering:
        await until(lambda: mesh.gateways[0].load["waiting"] == 1)
        await mesh.kill(leaves)
        response = await answering
        assert response.status_code == 503
        assert "missing" in response.json()["error"]["message"]


async def test_an_abort_reaches_a_scheduler_that_leaves(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(complete(client)):
        begun = await mesh.tokenizer.hear(Generate)
        await withdraw(mesh, mesh.scheduler)
    assert (await mesh.scheduler.hear(Abort)).request_id == begun.request_id


BODY = b'{"prompt": "hi", "max_tokens": 2}'
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
REQUEST = f"{HEAD}content-length: {len(BODY)}\r\n\r\n".encode() + BODY


async def test_a_gateway_that_leaves_a_shared_socket_turns_nobody_away(
    mesh: ScriptedMesh, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is connected is served once more; who connects waits for the next that listens."""
    monkeypatch.setattr(service, "MEETING_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0), backlog=50) as shared:
        url = await mesh.start_gateway(tiny_model, listen_fd=os.dup(shared.fileno()))
        await mesh.start_all()
        leaves = mesh.gateways[0]
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            await wait_ready(client)
            async with background(complete(client)) as answering:
                begun = await mesh.tokenizer.hear(Generate)
                mesh.accept(begun)
                reader, writer = await asyncio.open_connection("127.0.0.1", shared.getsockname()[1])
                await until(lambda: num_connections(leaves) == 2)
                leaves._on_signal(signal.SIGTERM)
                late = httpx.AsyncClient(base_url=url, timeout=30)
                async with late, background(late.get("/version")) as asking:
                    writer.write(REQUEST)
                    mesh.answer(await mesh.tokenizer.hear(Generate))
                    answer = await asyncio.wait_for(reader.read(), 20)
                    writer.close()
                    assert answer.startswith(b"HTTP/1.1 200")
                    assert not asking.done() and not mesh.ended()
                    next_fd = os.dup(shared.fileno())
                    await mesh.start_gateway(tiny_model, index=1, listen_fd=next_fd)
                    assert (await asking).status_code == 200
                mesh.answer(begun)
                assert (await answering).headers["connection"] == "close"
        await until(mesh.ended)


async def test_a_gateway_at_a_shared_socket_serves_when_it_can(
    mesh: ScriptedMesh, tiny_model: Path
) -> None:
    mesh.autopilot = True
    with socket.create_server(("127.0.0.1", 0), backlog=50) as shared:
        url = f"http://127.0.0.1:{shared.getsockname()[1]}"
        starting = mesh.start_gateway(tiny_model, listen_fd=os.dup(shared.fileno()))
        client = httpx.AsyncClient(base_url=url, timeout=30)
        async with client, background(starting), background(complete(client)) as asking:
            await until(lambda: bool(mesh.gateways))
            await mesh.start_all()
            assert (await asking).status_code == 200


def num_connections(gateway: GatewayService) -> int:
    assert gateway._server is not None
    return len(gateway._server._server.server_state.connections)

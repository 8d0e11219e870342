"""`GET /status`: whoever is there shows, and what it says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from services.gateway import gather
from shared.codec import Identity
from shared.messages import Figure, Message, Status, StatusReply, StatusRequest
from shared.types import ServiceName, State
from tests.services.gateway.scripted_mesh import Peer, ScriptedMesh

LOAD = [Figure("running", 3.0), Figure("kv_cache_usage", 0.25)]


def talkative(peer: Peer, status: Status) -> None:
    """It answers with this status from now on."""
    react = peer.react

    def answer(message: Message, sender: Identity) -> bool:
        if not isinstance(message, StatusRequest):
            return react(message, sender)
        peer.tell(StatusReply(message.request_id, status), sender.name)
        return True

    peer.react = answer


async def test_every_instance_shows_and_so_does_the_gateway(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    for number, peer in enumerate(mesh.peers):
        talkative(peer, Status(State.READY, "mill", 100 + number, 12.3456, LOAD))
    talkative(mesh.detokenizer, Status(State.LEAVING, "mill", 102, 1.0, []))
    status = (await client.get("/status")).json()
    assert status["model"] == "tiny" and status["missing"] == []
    assert status["mesh"] == f"ipc:{mesh.directory}"
    gateway, *others = status["instances"]
    assert (gateway["service"], gateway["name"]) == ("gateway", "gateway.0")
    assert (gateway["state"], gateway["pid"]) == ("ready", os.getpid())
    assert gateway["load"]["running"] == gateway["load"]["waiting"] == 0
    assert gateway["load"]["recoveries"] == 0
    services = ["tokenizer", "scheduler", "model-executor", "detokenizer"]
    assert [one["service"] for one in others] == services
    assert [one["state"] for one in others] == ["ready", "ready", "ready", "leaving"]
    assert others[1] == {
        "service": "scheduler",
        "name": "scheduler.0",
        "state": "ready",
        "incarnation": f"{mesh.scheduler.mesh.identity.incarnation:016x}",
        "host": "mill",
        "pid": 101,
        "age": 12.346,
        "load": {"running": 3, "kv_cache_usage": 0.25},
    }


async def test_who_does_not_answer_in_time_is_not_left_out(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "REPLY_SECONDS", 0.2)
    for peer in mesh.peers[1:]:
        talkative(peer, Status(State.READY, "mill", 1, 1.0, LOAD))
    found = {one["service"]: one for one in (await client.get("/status")).json()["instances"]}
    assert found["tokenizer"] == {
        "service": "tokenizer",
        "name": "tokenizer.0",
        "state": "silent",
    }
    assert found["scheduler"]["state"] == "ready"


async def test_every_gateway_shows_all(
    mesh: ScriptedMesh, client: httpx.AsyncClient, tiny_model: Path
) -> None:
    for peer in mesh.peers:
        talkative(peer, Status(State.READY, "mill", 1, 1.0, LOAD))
    url = await mesh.start_gateway(tiny_model, index=1)
    for peer in mesh.peers:
        await mesh.met(peer, gateway=1)
    async with httpx.AsyncClient(base_url=url) as second:
        for one in (client, second):
            instances = (await one.get("/status")).json()["instances"]
            assert [name["name"] for name in instances[:2]] == ["gateway.0", "gateway.1"]
            assert len(instances) == 2 + len(mesh.peers)


async def test_what_is_missing_is_said(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    for peer in mesh.peers:
        talkative(peer, Status(State.READY, "mill", 1, 1.0, LOAD))
    await mesh.kill(mesh.scheduler)
    while not (status := (await client.get("/status")).json())["missing"]:
        pass
    assert status["missing"] == ["scheduler"]
    assert ServiceName.SCHEDULER not in [one["service"] for one in status["instances"]]

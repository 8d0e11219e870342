"""The trace that the gateway gathers, with the other services in the test's hands."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from services.gateway import gather
from shared.codec import Identity
from shared.messages import Message, MetricsRequest, TraceReply, TraceRequest
from shared.trace import Event, pack
from tests.services.gateway.scripted_mesh import Peer, ScriptedMesh, background
from tests.trace_format import Shown, shown

SECOND = 10**9
HOUR = 3600 * SECOND


def tracing(peer: Peer, ahead: int = 0) -> Callable[[Message, Identity], bool]:
    """Answers with one iteration that has just ended, by a clock that is `ahead`, ns."""

    def react(message: Message, sender: Identity) -> bool:
        if not isinstance(message, TraceRequest):
            return isinstance(message, MetricsRequest)
        clock = time.monotonic_ns()
        now = clock + max(ahead, -clock // 2)  # no clock is before its start
        names, events = pack([Event("iteration", now - 1000, now, message.window, 1, 0)])
        peer.tell(TraceReply(message.request_id, now, names, events), sender.name)
        return True

    return react


async def trace(client: httpx.AsyncClient, **query: str) -> tuple[list[Shown], list[str]]:
    """Its events, and who is missing."""
    response = await client.get("/trace", params=query)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    content = response.json()
    return shown(content), content["otherData"]["unanswered"]


async def test_all_instances_are_in_it(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    for peer in mesh.peers:
        peer.react = tracing(peer)
    events, missing = await trace(client, seconds="2.5")
    iterations = [event for event in events if event.name == "iteration"]
    services = {"tokenizer 0", "scheduler 0", "detokenizer 0", "model-executor 0"}
    assert {event.process for event in iterations} == services
    assert {event.args["step"] for event in iterations} == {2.5 * SECOND}
    own = {event.name for event in events if event.process == "gateway 0"}
    assert {"Deltas", "Accepted", "Credit"} <= own  # of the probe
    assert missing == []


async def test_the_default_is_five_seconds(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    for peer in mesh.peers:
        peer.react = tracing(peer)
    events, _ = await trace(client)
    assert {event.args["step"] for event in events if event.name == "iteration"} == {5 * SECOND}


async def test_only_the_window_is_shown(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    for peer in mesh.peers:
        peer.react = tracing(peer)
    events, _ = await trace(client, seconds="0.000000001")
    assert {event.name for event in events if event.process == "gateway 0"} == {"TraceReply"}


@pytest.mark.parametrize("ahead", [-HOUR, -30 * SECOND, 30 * SECOND, HOUR])
async def test_another_hosts_clock_is_put_right(
    mesh: ScriptedMesh, client: httpx.AsyncClient, ahead: int
) -> None:
    for peer in mesh.peers:
        peer.react = tracing(peer, ahead if peer is mesh.executor else 0)
    before = time.monotonic_ns()
    events, _ = await trace(client)
    now = time.monotonic_ns()
    ends = {e.process: e.ended * 1000 for e in events if e.name == "iteration"}
    assert len(ends) == 4
    assert all(before <= end <= now for end in ends.values())


async def test_a_silent_service_is_named(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "REPLY_SECONDS", 0.2)
    for peer in mesh.peers:
        peer.react = tracing(peer)
    mesh.executor.react = lambda message, sender: True
    events, missing = await trace(client)
    assert missing == ["model-executor 0"]
    assert "scheduler 0" in {event.process for event in events}


async def test_a_service_lost_meanwhile_is_not_waited_for(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "REPLY_SECONDS", 20)
    for peer in mesh.peers:
        peer.react = tracing(peer)
    mesh.executor.react = lambda message, sender: False
    asking = client.get("/trace")
    async with background(asking) as answering:
        await mesh.executor.hear(TraceRequest)
        await mesh.kill(mesh.executor)
        assert (await answering).json()["otherData"] == {"unanswered": []}


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "inf", "x", ""])
async def test_seconds_that_are_none(client: httpx.AsyncClient, seconds: str) -> None:
    response = await client.get("/trace", params={"seconds": seconds})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "seconds"

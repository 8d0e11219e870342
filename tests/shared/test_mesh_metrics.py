"""What a mesh measures: how long messages travel, and how late its loop is."""

from __future__ import annotations

import time

import pytest

from shared.codec import Identity, encode
from shared.mesh import inbox
from shared.mesh.metrics import LONGEST_HOP_SECONDS
from shared.messages import Abort
from shared.types import Incarnation, RequestId, ServiceName
from tests.shared.mesh_member import IpcMembers, Member, raw_push, until

GATEWAY, TOKENIZER = ServiceName.GATEWAY, ServiceName.TOKENIZER
FRIEND = Identity(GATEWAY, "gateway.0", Incarnation(3))


def hops(member: Member, part: str) -> float | None:
    """The gateway's hops to this member; None before the first."""
    labels = {"service": member.service.value, "peer_service": "gateway"}
    return member.mesh.registry.get_sample_value(f"headrace_mesh_hop_seconds_{part}", labels)


def lag(member: Member, part: str) -> float:
    labels = {"service": member.service.value, "instance": member.name}
    name = f"headrace_event_loop_lag_seconds_{part}"
    value = member.mesh.registry.get_sample_value(name, labels)
    assert value is not None
    return value


async def test_a_hop_lasts_from_the_sending_to_the_handling(ipc_members: IpcMembers) -> None:
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        assert hops(tokenizer, "count") is None
        began = time.monotonic()
        gateway.tell(tokenizer, "hello")
        time.sleep(0.02)  # noqa: ASYNC251 - nothing is received meanwhile
        gateway.mesh.broadcast(TOKENIZER, Abort(RequestId("all"), ""))
        await until(lambda: tokenizer.heard == ["hello", "all"])
        assert hops(tokenizer, "count") == 2
        total = hops(tokenizer, "sum")
        assert total is not None
        assert 0.02 <= total <= 2 * (time.monotonic() - began)


async def test_the_times_of_another_clock_are_not_counted(ipc_members: IpcMembers) -> None:
    tokenizer = ipc_members(TOKENIZER)
    hour = int(LONGEST_HOP_SECONDS * 1e9)
    async with tokenizer.present():
        with raw_push(ipc_members.directory, tokenizer.name) as push:
            for number, age in enumerate((-hour, -(10**9), 10**6, hour, 2 * hour, 2**62)):
                sent = time.monotonic_ns() - age
                push.send(encode(Abort(RequestId(str(number)), ""), FRIEND, sent))
            await until(lambda: len(tokenizer.heard) == 6)
    assert hops(tokenizer, "count") == 1


async def test_a_late_loop_shows(ipc_members: IpcMembers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "STALL_CHECK_SECONDS", 0.05)
    tokenizer = ipc_members(TOKENIZER)
    async with tokenizer.present():
        time.sleep(0.15)  # noqa: ASYNC251 - the loop is held up on purpose
        await until(lambda: lag(tokenizer, "count") > 0)
        assert lag(tokenizer, "sum") > 0.095

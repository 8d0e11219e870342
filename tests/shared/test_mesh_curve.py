"""Over TCP only members are heard, and only members are spoken to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq

from shared.codec import MAX_FRAME_BYTES, encode
from shared.mesh.curve import MeshKeys, make_keys
from shared.messages import Abort
from shared.settings import BadSetting
from shared.types import RequestId, ServiceName
from tests.shared.mesh_member import TcpMembers, until

GATEWAY, TOKENIZER = ServiceName.GATEWAY, ServiceName.TOKENIZER
LONG_ENOUGH = 0.3  # seconds; whoever is let in is let in within milliseconds


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys").parent


@contextmanager
def connected(endpoint: str, **options: bytes) -> Iterator[zmq.Socket[bytes]]:
    """A stranger's socket."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.set(zmq.LINGER, 0)
        for name, value in options.items():
            push.set(getattr(zmq, name), value)
        push.connect(endpoint)
        yield push


def turned_away(logs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [log for log in logs if log["event"] == "stranger turned away"]


def hows(logs: Sequence[Mapping[str, Any]]) -> set[str | None]:
    return {log.get("how") for log in turned_away(logs)}


async def test_members_talk(tcp_members: TcpMembers, keys: Path) -> None:
    members = tcp_members.with_keys(keys)
    gateway, tokenizer = members(GATEWAY, TOKENIZER), members(TOKENIZER, GATEWAY)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer) and tokenizer.sees(gateway))
        for number in range(100):
            assert gateway.tell(tokenizer, number)
        await until(lambda: len(tokenizer.heard) == 100)


async def test_strangers_are_turned_away(tcp_members: TcpMembers, keys: Path) -> None:
    """Without keys, with keys of their own, and with those that know the inbox's public key."""
    members = tcp_members.with_keys(keys)
    gateway, tokenizer = members(GATEWAY, TOKENIZER), members(TOKENIZER, GATEWAY)
    endpoint, public = members.endpoint(TOKENIZER), MeshKeys.load(keys).public
    own_public, own_secret = zmq.curve_keypair()
    own = {"CURVE_PUBLICKEY": own_public, "CURVE_SECRETKEY": own_secret}
    frame = encode(Abort(RequestId("stranger"), ""), gateway.mesh.identity)
    with structlog.testing.capture_logs() as logs:
        async with gateway.present(), tokenizer.present():
            await until(lambda: gateway.sees(tokenizer))
            with (
                connected(endpoint) as plain,
                connected(endpoint, CURVE_SERVERKEY=own_public, **own) as wrong,
                connected(endpoint, CURVE_SERVERKEY=public, **own) as knowing,
            ):
                for stranger in (plain, wrong, knowing):
                    for _ in range(10):
                        stranger.send(frame, zmq.NOBLOCK)
                await until(lambda: {None, "with keys of another mesh"} <= hows(logs))
                await asyncio.sleep(LONG_ENOUGH)
            gateway.tell(tokenizer, "member")
            await until(lambda: tokenizer.heard == ["member"])
        assert tokenizer.metric("frames_received") == 1
    assert {log.get("key") for log in turned_away(logs)} == {None, own_public.decode()}


async def test_strangers_without_keys_are_told(tcp_members: TcpMembers, keys: Path) -> None:
    members = tcp_members.with_keys(keys)
    tokenizer = members(TOKENIZER)
    with structlog.testing.capture_logs() as logs:
        async with tokenizer.present(), asyncio.timeout(20):
            while "without keys" not in hows(logs):  # now and then the stranger is first to leave
                with connected(members.endpoint(TOKENIZER)):
                    await asyncio.sleep(0.1)


async def test_other_keys_and_none_make_another_mesh(
    tcp_members: TcpMembers, keys: Path, tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other").parent
    gateway = tcp_members.with_keys(keys)(GATEWAY, TOKENIZER)
    async with gateway.present():
        for members in (tcp_members.with_keys(other), tcp_members):
            tokenizer = members(TOKENIZER, GATEWAY)
            async with tokenizer.present():
                await asyncio.sleep(LONG_ENOUGH)
                assert not gateway.sees(tokenizer)
                assert not tokenizer.sees(gateway)
    assert gateway.events == []


POD_USER, POD_GROUP = 10001, 10002


@pytest.mark.parametrize(
    ("mode", "user", "group", "refused"),
    [
        (0o600, POD_USER, POD_USER, False),
        (0o640, POD_USER, POD_USER, True),
        (0o440, 0, POD_GROUP, False),  # a Kubernetes secret under the pod's fsGroup
        (0o440, 0, 7, True),
        (0o460, 0, POD_GROUP, True),
        (0o444, 0, POD_GROUP, True),
    ],
)
def test_only_a_file_of_roots_may_be_its_groups(
    mode: int, user: int, group: int, refused: bool, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: POD_USER)
    monkeypatch.setattr(os, "getgroups", lambda: [POD_GROUP])
    status = os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self, **_: status)
    with pytest.raises(BadSetting, match="others can read") if refused else nullcontext():
        MeshKeys.load(keys)


async def test_an_oversized_frame_of_a_member_is_cut_off(
    tcp_members: TcpMembers, keys: Path
) -> None:
    members, mesh_keys = tcp_members.with_keys(keys), MeshKeys.load(keys)
    tokenizer = members(TOKENIZER)
    own = {"CURVE_PUBLICKEY": mesh_keys.public, "CURVE_SECRETKEY": mesh_keys.secret}
    good = encode(Abort(RequestId("good"), ""), tokenizer.mesh.identity)
    async with tokenizer.present():
        endpoint = members.endpoint(TOKENIZER)
        with connected(endpoint, CURVE_SERVERKEY=mesh_keys.public, **own) as push:
            monitor = push.get_monitor_socket(zmq.Event.DISCONNECTED)
            push.send(bytes(MAX_FRAME_BYTES + 1024))
            await until(lambda: monitor.poll(0))
            push.disable_monitor()
            monitor.close()
        assert tokenizer.metric("frames_received") == 0
        with connected(endpoint, CURVE_SERVERKEY=mesh_keys.public, **own) as push:
            push.send(good)
            await until(lambda: tokenizer.heard == ["good"])

"""Over TCP only members are heard, and only members are spoken to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
import zmq

from shared.codec import encode
from shared.mesh.curve import MeshKeys, make_keys
from shared.messages import Abort
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
                await until(lambda: any(log["event"] == "stranger turned away" for log in logs))
                await asyncio.sleep(LONG_ENOUGH)
            gateway.tell(tokenizer, "member")
            await until(lambda: tokenizer.heard == ["member"])
        assert tokenizer.metric("frames_received") == 1
    turned_away = [log["key"] for log in logs if log["event"] == "stranger turned away"]
    assert own_public.decode() in turned_away


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

"""An instance that leaves is chosen for nothing new, and is still there for what was begun."""

from __future__ import annotations

from collections.abc import Callable

from shared.codec import Identity, encode
from shared.messages import Leaving
from shared.types import Incarnation, ServiceName
from tests.shared.mesh_member import IpcMembers, Member, raw_push, until

GATEWAY, TOKENIZER, DETOKENIZER = (
    ServiceName.GATEWAY,
    ServiceName.TOKENIZER,
    ServiceName.DETOKENIZER,
)

Members = Callable[..., Member]


def told(member: Member, event: str, other: Member) -> bool:
    return (event, other.name) in member.events


async def test_who_leaves_is_given_nothing_new_but_is_there(members: Members) -> None:
    gateway = members(GATEWAY, TOKENIZER)
    leaves, stays = members(TOKENIZER, GATEWAY), members(TOKENIZER, GATEWAY, index=1)
    async with gateway.present(), stays.present():
        async with leaves.present():
            await until(lambda: gateway.sees(leaves) and gateway.sees(stays))
            await until(lambda: leaves.sees(gateway))
            leaves.mesh.withdraw()
            await until(lambda: told(gateway, "leaving", leaves))
            assert gateway.mesh.peers(TOKENIZER) == [stays.name]
            assert gateway.mesh.present(TOKENIZER) == sorted([leaves.name, stays.name])
            assert gateway.tell(leaves, "what was begun goes on")
            await until(lambda: leaves.heard)
            leaves.tell(gateway, "and is answered")
            await until(lambda: gateway.heard == ["and is answered"])
        await until(lambda: told(gateway, "lost", leaves))
        assert gateway.mesh.present(TOKENIZER) == [stays.name]


async def test_a_broadcast_reaches_who_leaves(members: Members) -> None:
    gateway, leaves = members(GATEWAY, TOKENIZER), members(TOKENIZER, GATEWAY)
    async with gateway.present(), leaves.present():
        await until(lambda: gateway.sees(leaves) and leaves.sees(gateway))
        leaves.mesh.withdraw()
        await until(lambda: told(gateway, "leaving", leaves))
        gateway.mesh.broadcast(TOKENIZER, Leaving())
        await until(lambda: told(leaves, "leaving", gateway))


async def test_who_joins_later_is_told_after_it_has_joined(members: Members) -> None:
    leaves = members(TOKENIZER, GATEWAY)
    async with leaves.present():
        leaves.mesh.withdraw()
        gateway = members(GATEWAY, TOKENIZER)
        async with gateway.present():
            await until(lambda: told(gateway, "leaving", leaves))
            assert gateway.events == [("joined", leaves.name), ("leaving", leaves.name)]
            assert gateway.mesh.peers(TOKENIZER) == []


async def test_the_next_life_does_not_leave(members: Members) -> None:
    gateway = members(GATEWAY, TOKENIZER)
    async with gateway.present():
        for _ in range(2):
            tokenizer = members(TOKENIZER, GATEWAY)
            async with tokenizer.present():
                await until(lambda: gateway.sees(tokenizer) and tokenizer.sees(gateway))  # noqa: B023
                tokenizer.mesh.withdraw()
                await until(lambda: not gateway.sees(tokenizer))  # noqa: B023
            await until(lambda: not gateway.mesh.present(TOKENIZER))
    story = [event for event, _ in gateway.events]
    assert story == ["joined", "leaving", "lost"] * 2


async def test_it_is_told_once_however_often_it_is_said(members: Members) -> None:
    gateway, leaves = members(GATEWAY, TOKENIZER), members(TOKENIZER, GATEWAY)
    async with gateway.present(), leaves.present():
        await until(lambda: gateway.sees(leaves) and leaves.sees(gateway))
        for _ in range(3):
            leaves.mesh.withdraw()
        leaves.tell(gateway, "that was all")
        await until(lambda: gateway.heard)
        assert gateway.events == [("joined", leaves.name), ("leaving", leaves.name)]


async def test_only_peers_leave(ipc_members: IpcMembers) -> None:
    """Nobody is there under these names, or nothing is ever sent to them."""
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER, GATEWAY)
    strangers = [(TOKENIZER, "tokenizer.7"), (DETOKENIZER, "detokenizer.0")]
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer) and tokenizer.sees(gateway))
        with raw_push(ipc_members.directory, gateway.name) as push:
            for service, name in strangers:
                push.send(encode(Leaving(), Identity(service, name, Incarnation(1))))
            await until(lambda: gateway.metric("frames_received") == len(strangers))
        assert gateway.events == [("joined", tokenizer.name)]
        assert gateway.mesh.peers(TOKENIZER) == [tokenizer.name]

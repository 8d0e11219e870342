"""Who is there, who goes, and that each message arrives once and in order."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq

from shared.codec import encode
from shared.messages import Abort
from shared.types import Incarnation, RequestId, ServiceName
from tests.shared.mesh_member import PATIENCE, IpcMembers, Member, TcpMembers, raw_push, until

GATEWAY, TOKENIZER, SCHEDULER = ServiceName.GATEWAY, ServiceName.TOKENIZER, ServiceName.SCHEDULER

Members = Callable[..., Member]


async def test_instances_find_each_other_in_any_order(members: Members) -> None:
    early, late = members(GATEWAY, TOKENIZER), members(TOKENIZER, GATEWAY)
    async with early.present():
        assert early.mesh.peers(TOKENIZER) == []
        async with late.present():
            await until(lambda: early.sees(late) and late.sees(early))
    assert early.events == [("joined", late.name), ("lost", late.name)]
    assert late.events == [("joined", early.name)]


async def test_messages_arrive_in_order_with_their_sender(members: Members) -> None:
    gateway, tokenizer = members(GATEWAY, TOKENIZER), members(TOKENIZER)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        for number in range(2000):
            assert gateway.tell(tokenizer, number)
        await until(lambda: len(tokenizer.heard) == 2000)
        assert tokenizer.heard == [str(number) for number in range(2000)]
        assert tokenizer.senders == {gateway.mesh.identity}
        assert gateway.metric("frames_sent") == tokenizer.metric("frames_received") == 2000


async def test_each_instance_of_a_service_is_a_peer_of_its_own(members: Members) -> None:
    gateway = members(GATEWAY, TOKENIZER)
    first, second = (members(TOKENIZER, index=index) for index in range(2))
    async with gateway.present(), first.present(), second.present():
        await until(lambda: gateway.sees(first) and gateway.sees(second))
        assert gateway.mesh.peers(TOKENIZER) == sorted([first.name, second.name])
        gateway.tell(second, "you")
        await until(lambda: second.heard == ["you"])
        assert first.heard == []


async def test_an_instance_is_no_peer_of_itself(members: Members) -> None:
    first, second = (members(TOKENIZER, TOKENIZER, index=index) for index in range(2))
    async with first.present(), second.present():
        await until(lambda: first.sees(second) and second.sees(first))
        assert first.mesh.peers(TOKENIZER) == [second.name]
        assert not first.tell(first, "me")


async def test_nothing_is_sent_to_who_is_not_there(members: Members) -> None:
    gateway, tokenizer = members(GATEWAY, TOKENIZER), members(TOKENIZER)
    stranger = members(SCHEDULER)
    async with gateway.present(), stranger.present():
        assert not gateway.tell(tokenizer, "nobody there")
        assert not gateway.tell(stranger, "of a service it does not talk to")
        async with tokenizer.present():
            await until(lambda: gateway.sees(tokenizer))
            assert tokenizer.heard == []
        await until(lambda: not gateway.sees(tokenizer))
        assert not gateway.tell(tokenizer, "gone")
        assert gateway.metric("undelivered") == 3


async def test_a_restart_is_a_loss_and_a_new_peer(members: Members) -> None:
    gateway = members(GATEWAY, TOKENIZER)
    async with gateway.present():
        for life in range(3):
            tokenizer = members(TOKENIZER)
            async with tokenizer.present():
                await until(lambda: gateway.sees(tokenizer))  # noqa: B023
                gateway.tell(tokenizer, life)
                await until(lambda: tokenizer.heard)  # noqa: B023
                assert tokenizer.heard == [str(life)]
            await until(lambda: not gateway.sees(tokenizer))  # noqa: B023
    assert gateway.events == [("joined", tokenizer.name), ("lost", tokenizer.name)] * 3


@pytest.mark.parametrize("turns", range(8))
async def test_discovery_can_be_cancelled_at_any_moment(
    ipc_members: IpcMembers, turns: int
) -> None:
    """`asyncio.wait_for` swallows a cancellation that meets the end of what it waits for."""
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    lost = asyncio.Event()
    gateway.mesh.open(lambda *_: None, lambda *_: None, lambda *_: lost.set())
    discovery = asyncio.create_task(gateway.mesh.discover())
    async with tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        await asyncio.sleep(0.1)  # until it waits for news
    await lost.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    discovery.cancel()
    await asyncio.wait({discovery}, timeout=PATIENCE)
    assert discovery.cancelled()
    gateway.mesh.close()


async def test_what_was_meant_for_a_former_life_dies_with_it(members: Members) -> None:
    gateway, former = members(GATEWAY, TOKENIZER), members(TOKENIZER)
    next_life = members(TOKENIZER)
    async with gateway.present():
        async with former.present():
            await until(lambda: gateway.sees(former))
            for number in range(3000):
                gateway.tell(former, number, padding="x" * 2000)  # more than the kernel buffers
        async with next_life.present():
            time.sleep(0.3)  # noqa: ASYNC251 - the sender hears nothing of it meanwhile
            gateway.tell(next_life, "sent before the loss was known")
            await until(lambda: gateway.events.count(("joined", former.name)) == 2)
            assert gateway.tell(next_life, "hello")
            await until(lambda: next_life.heard)
            assert next_life.heard == ["hello"]


async def test_the_voice_of_a_next_life_ends_the_link_to_the_former(
    ipc_members: IpcMembers,
) -> None:
    """A host that vanished closes no connection; its successor may speak before that is seen."""
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER, GATEWAY)
    next_life = replace(tokenizer.mesh.identity, incarnation=Incarnation(1))
    story: list[str] = []
    gateway.on_heard = lambda: story.append(f"heard after {len(gateway.events)} events")
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer) and tokenizer.sees(gateway))
        tokenizer.tell(gateway, "old")
        await until(lambda: gateway.heard == ["old"])
        with raw_push(ipc_members.directory, gateway.name) as push:
            push.send(encode(Abort(RequestId("new"), ""), next_life))
            await until(lambda: gateway.heard == ["old", "new"])
            assert story == ["heard after 1 events", "heard after 2 events"]
            assert gateway.events[1] == ("lost", tokenizer.name)
            await until(lambda: gateway.events[2:] == [("joined", tokenizer.name)])


async def test_closing_gives_back_all_descriptors(members: Members) -> None:
    def open_descriptors() -> int:
        gc.collect()  # of what other tests left
        return len(os.listdir("/proc/self/fd"))

    async def meet() -> None:
        left, right = members(GATEWAY, TOKENIZER, SCHEDULER), members(TOKENIZER, GATEWAY)
        async with left.present(), right.present():
            await until(lambda: left.sees(right) and right.sees(left))

    await meet()  # what the loop and libzmq open once and keep
    before = open_descriptors()
    for _ in range(3):
        await meet()
    assert open_descriptors() <= before


async def test_an_idle_mesh_uses_next_to_no_cpu(members: Members) -> None:
    left, right = members(GATEWAY, TOKENIZER, SCHEDULER), members(TOKENIZER, GATEWAY)
    async with left.present(), right.present():
        await until(lambda: left.sees(right) and right.sees(left))
        before = time.process_time()
        await asyncio.sleep(2)
        assert time.process_time() - before < 0.05


async def test_a_taken_address_is_refused_and_its_owner_unharmed(members: Members) -> None:
    gateway, owner = members(GATEWAY, TOKENIZER), members(TOKENIZER)
    async with gateway.present(), owner.present():
        await until(lambda: gateway.sees(owner))
        with pytest.raises(zmq.ZMQError, match="in use"):
            async with members(TOKENIZER).present():
                pass
        gateway.tell(owner, "still there")
        await until(lambda: owner.heard == ["still there"])
        latecomer = members(SCHEDULER, TOKENIZER)
        async with latecomer.present():
            await until(lambda: latecomer.sees(owner))


async def test_a_mesh_of_one_kind_is_no_mesh_of_the_other(
    ipc_members: IpcMembers, tcp_members: TcpMembers
) -> None:
    here, there = ipc_members(GATEWAY, TOKENIZER), tcp_members(TOKENIZER, GATEWAY)
    async with here.present(), there.present():
        await asyncio.sleep(0.2)
        assert here.events == there.events == []

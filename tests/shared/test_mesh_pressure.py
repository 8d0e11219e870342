"""A mesh under load and under attack: bursts, full queues, garbage, frozen peers, stale sockets."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import zmq

from shared.codec import MAX_FRAME_BYTES, encode
from shared.mesh import inbox, peer
from shared.messages import Abort
from shared.types import RequestId, ServiceName
from tests.shared.mesh_member import IpcMembers, Member, raw_push, until

GATEWAY, TOKENIZER = ServiceName.GATEWAY, ServiceName.TOKENIZER
CAPACITY = inbox.HIGH_WATER_MARK + peer.HIGH_WATER_MARK  # frames


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


async def test_a_burst_reaches_a_slow_loop_whole_and_in_order(ipc_members: IpcMembers) -> None:
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    tokenizer.on_heard = lambda: time.sleep(2e-5)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        for number in range(20_000):
            assert gateway.tell(tokenizer, number)
            if number % 200 == 0:  # the queues fill faster than they are drained
                await asyncio.sleep(0)
        await until(lambda: len(tokenizer.heard) == 20_000)
        assert tokenizer.heard == numbers(20_000)
    assert ("lost", tokenizer.name) not in gateway.events[:-1]


async def test_a_full_queue_loses_the_link_and_no_single_message(ipc_members: IpcMembers) -> None:
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        sent = 0
        while gateway.tell(tokenizer, sent, padding="x" * 1000):
            sent += 1
            assert sent < 2 * CAPACITY
        assert not gateway.sees(tokenizer)
        assert gateway.events == [("joined", tokenizer.name)]  # never told amid a send
        await until(lambda: gateway.events[-2:] == [("lost", tokenizer.name), gateway.events[0]])
        assert gateway.tell(tokenizer, "after")
        await until(lambda: "after" in tokenizer.heard)
        before = [text for text in tokenizer.heard if text != "after"]  # which may overtake them
        assert before == numbers(len(before))  # a prefix, without holes


async def test_a_flood_leaves_the_loop_to_others(
    ipc_members: IpcMembers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "STALL_CHECK_SECONDS", 1e-4)  # as if the flood lasted for minutes
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        for number in range(peer.HIGH_WATER_MARK):
            assert gateway.tell(tokenizer, number)
        largest = heard = 0
        while heard < peer.HIGH_WATER_MARK:
            await asyncio.sleep(0)
            largest, heard = max(largest, len(tokenizer.heard) - heard), len(tokenizer.heard)
        assert 0 < largest <= inbox.DRAIN_LIMIT


async def test_garbage_is_counted_and_dropped(ipc_members: IpcMembers) -> None:
    tokenizer = ipc_members(TOKENIZER)
    good = encode(Abort(RequestId("good"), ""), tokenizer.mesh.identity)
    async with tokenizer.present():
        with raw_push(ipc_members.directory, tokenizer.name) as push:
            for frame in (b"", b"\xc1", good[:-1], good + b"\0", b"\x91" * 5000, good):
                push.send(frame)
            push.send_multipart([good, b"second part", good])
            await until(lambda: tokenizer.metric("frames_received") == 9)
        assert tokenizer.heard == ["good"] * 3
        assert tokenizer.metric("bad_frames") == 6


async def test_an_oversized_frame_from_outside_hurts_only_its_sender(
    ipc_members: IpcMembers,
) -> None:
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        with raw_push(ipc_members.directory, tokenizer.name) as push:
            monitor = push.get_monitor_socket(zmq.Event.DISCONNECTED)
            push.send(bytes(MAX_FRAME_BYTES + 1))
            await until(lambda: monitor.poll(0))
            push.disable_monitor()
            monitor.close()
        gateway.tell(tokenizer, "well")
        await until(lambda: tokenizer.heard == ["well"])
        assert gateway.events == [("joined", tokenizer.name)]


async def test_too_long_a_message_is_refused_and_the_link_kept(ipc_members: IpcMembers) -> None:
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        assert not gateway.tell(tokenizer, "long", padding="x" * MAX_FRAME_BYTES)
        assert gateway.tell(tokenizer, "short")
        await until(lambda: tokenizer.heard)
        assert tokenizer.heard == ["short"]
        assert gateway.events == [("joined", tokenizer.name)]


async def test_a_stale_socket_is_no_peer_and_no_obstacle(ipc_members: IpcMembers) -> None:
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(f"{ipc_members.directory}/{tokenizer.name}.sock")
    async with gateway.present():
        before = time.process_time()
        await asyncio.sleep(1)
        assert time.process_time() - before < 0.1  # it is not tried again and again
        assert gateway.events == []
        async with tokenizer.present():
            await until(lambda: gateway.sees(tokenizer))


async def test_sockets_of_other_kinds_are_no_peers(ipc_members: IpcMembers) -> None:
    for name in ("tokenizer.0", "tokenizer.sock", "gateway.0.sock.old", "notes.txt"):
        (ipc_members.directory / name).touch()
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        assert gateway.mesh.peers(TOKENIZER) == [tokenizer.name]


FROZEN = """
import sys, time, zmq
inbox = zmq.Context().socket(zmq.PULL)
inbox.bind(sys.argv[1])
print("bound", flush=True)
time.sleep(600)
"""


async def test_a_frozen_peer_is_lost(
    ipc_members: IpcMembers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(peer, "HEARTBEAT_TIMEOUT_MS", 300)
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    endpoint = f"ipc://{ipc_members.directory}/{tokenizer.name}.sock"
    command = [sys.executable, "-c", FROZEN, endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"bound\n"
            async with gateway.present():
                await until(lambda: gateway.sees(tokenizer))
                await asyncio.sleep(0.6)
                assert gateway.sees(tokenizer)  # it answers heartbeats, asleep as it is
                process.send_signal(signal.SIGSTOP)
                await until(lambda: gateway.events[-1:] == [("lost", tokenizer.name)])
        finally:
            process.kill()


async def test_no_wakeup_is_lost(ipc_members: IpcMembers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages trickle in while the loop is busy; each must arrive before the next is sent."""
    monkeypatch.setattr(inbox, "STALL_CHECK_SECONDS", 3600)  # nothing but the FD may wake it
    tokenizer = ipc_members(TOKENIZER)
    count = 400
    arrived = threading.Semaphore(0)
    tokenizer.on_heard = arrived.release
    ended = threading.Event()
    lost: list[int] = []

    def trickle() -> None:
        rng = random.Random(4)
        with raw_push(ipc_members.directory, tokenizer.name) as push:
            for number in range(count):
                time.sleep(rng.choice([0, 0, 1e-4, 1e-3, 8e-3]))
                push.send(encode(Abort(RequestId(str(number)), ""), tokenizer.mesh.identity))
                if not arrived.acquire(timeout=15):
                    lost.append(number)
                    break
        ended.set()

    async with tokenizer.present():
        thread = threading.Thread(target=trickle)
        thread.start()
        rng = random.Random(5)
        while not ended.is_set():
            until_then = time.perf_counter() + rng.choice([0, 1e-4, 3e-3])
            while time.perf_counter() < until_then:
                pass
            await asyncio.sleep(rng.choice([0, 0, 5e-4, 5e-3]))
        thread.join()
        assert not lost
        assert tokenizer.heard == numbers(count)


async def test_a_lost_wakeup_is_made_good(
    ipc_members: IpcMembers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "STALL_CHECK_SECONDS", 0.05)
    gateway, tokenizer = ipc_members(GATEWAY, TOKENIZER), ipc_members(TOKENIZER)
    async with gateway.present(), tokenizer.present():
        await until(lambda: gateway.sees(tokenizer))
        _deafen(tokenizer)
        gateway.tell(tokenizer, "hello")
        await until(lambda: tokenizer.heard == ["hello"])


def _deafen(member: Member) -> None:
    """Take the inbox's FD off the loop, as if its edge were lost."""
    asyncio.get_running_loop().remove_reader(member.mesh._inbox._socket.fileno())

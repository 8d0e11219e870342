"""The hop from scheduler to executor and back: two processes and a real ipc mesh between them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import uvloop

from shared.codec import Identity, decode, encode
from shared.logs import configure_logs
from shared.mesh import Mesh, MeshAddress
from shared.messages import Announce, Message, Plan, StepResult
from shared.settings import Settings
from shared.types import Incarnation, ServiceName, int32s

PLAN_ROWS = 256
BLOCK_SIZE = 16
ROUNDS = 2000
WARM_ROUNDS = 200
SAMPLES = 300  # of encoding and decoding

SCHEDULER, EXECUTOR = ServiceName.SCHEDULER, ServiceName.MODEL_EXECUTOR


@dataclass(frozen=True, slots=True)
class Hops:
    """Seconds for one plan and its result."""

    parts: dict[str, float]  # CPU time of encoding and decoding each
    cpu: float  # CPU time of both processes, all threads, for a round trip
    wall: float


def decode_plan() -> Plan:
    """All rows decode; one in sixteen needs a block."""
    growing = PLAN_ROWS // BLOCK_SIZE
    return Plan(
        step=1_000_000,
        retired=int32s(),
        entering=[],
        block_slots=int32s(range(growing)),
        block_counts=int32s([1] * growing),
        block_ids=int32s(range(70_000, 70_000 + growing)),
        row_slots=int32s(range(PLAN_ROWS)),
        row_starts=int32s(range(1000, 1000 + PLAN_ROWS)),
        row_tokens=int32s([1] * PLAN_ROWS),
    )


def step_result() -> StepResult:
    return StepResult(
        epoch=Incarnation(1 << 60),
        step=1_000_000,
        handles=int32s(range(100_000, 100_000 + PLAN_ROWS)),
        positions=int32s(range(1000, 1000 + PLAN_ROWS)),
        token_ids=int32s(range(PLAN_ROWS)),
        finishes=bytes(PLAN_ROWS),
    )


class End:
    """One process's place in the mesh; `on_message` is told what comes."""

    def __init__(self, service: ServiceName, other: ServiceName, directory: str) -> None:
        address = MeshAddress.from_settings(service, Settings(mesh=f"ipc:{directory}"))
        self.mesh = Mesh(service, address, [other])
        self.joined = asyncio.Event()
        self.lost = asyncio.Event()
        self._other = other

    def open(self, on_message: Callable[[Message], None]) -> asyncio.Task[None]:
        def handle(message: Message, sender: Identity) -> None:
            on_message(message)

        def joined(service: ServiceName, name: str) -> None:
            self.joined.set()

        def lost(service: ServiceName, name: str) -> None:
            self.lost.set()

        self.mesh.open(handle, joined, lost)
        return asyncio.create_task(self.mesh.discover())

    def send(self, message: Message) -> None:
        if not self.mesh.send(self._other, f"{self._other}.0", message):
            raise RuntimeError("the other process is gone")


async def answer(directory: str) -> None:
    """The executor's end: a result for each plan, until the scheduler leaves."""
    end, result = End(EXECUTOR, SCHEDULER, directory), step_result()
    began = time.process_time()

    def reply(message: Message) -> None:
        nonlocal began
        if isinstance(message, Plan) and message.row_slots:
            end.send(result)
        elif isinstance(message, Plan):  # an empty one asks for the CPU time since the last
            spent, began = time.process_time() - began, time.process_time()
            end.send(Announce("cpu", max(1, int(spent * 1e6)), 1, 1, 1, 1, 1))

    discovery = end.open(reply)
    await end.joined.wait()
    await end.lost.wait()
    discovery.cancel()
    end.mesh.close()


def measure_hops() -> Hops:
    """Round trips, one at a time."""
    with TemporaryDirectory(prefix="hops-", dir="/tmp") as directory:
        child = subprocess.Popen([sys.executable, __file__, directory])
        try:
            configure_logs("warning", "auto", SCHEDULER, 0)
            return uvloop.run(_measure(directory))
        finally:
            child.terminate()
            child.wait()


async def _measure(directory: str) -> Hops:
    end, plan = End(SCHEDULER, EXECUTOR, directory), decode_plan()
    none = int32s()
    question = Plan(0, none, [], none, none, none, none, none, none)
    heard: asyncio.Queue[Message] = asyncio.Queue()
    finished = asyncio.Event()
    rounds = 0

    def on_message(message: Message) -> None:
        nonlocal rounds
        if isinstance(message, Announce):
            heard.put_nowait(message)
        elif rounds := rounds - 1:
            end.send(plan)
        else:
            finished.set()

    async def run(count: int) -> None:
        nonlocal rounds
        rounds = count
        finished.clear()
        end.send(plan)
        await finished.wait()

    async def child_cpu() -> float:
        end.send(question)
        message = await heard.get()
        assert isinstance(message, Announce)
        return message.num_blocks / 1e6

    discovery = end.open(on_message)
    await end.joined.wait()
    await run(WARM_ROUNDS)
    await child_cpu()
    cpu, began = time.process_time(), time.perf_counter()
    await run(ROUNDS)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    cpu += await child_cpu()
    discovery.cancel()
    parts = _parts(plan, end.mesh.identity)
    end.mesh.close()
    return Hops(parts, cpu / ROUNDS, wall / ROUNDS)


def _parts(plan: Plan, identity: Identity) -> dict[str, float]:
    parts = {}
    for name, message in (("plan", plan), ("result", step_result())):
        frame = encode(message, identity)
        began = time.process_time()
        for _ in range(SAMPLES):
            encode(message, identity)
        between = time.process_time()
        for _ in range(SAMPLES):
            decode(frame)
        parts[f"encode the {name} ({len(frame)} bytes)"] = (between - began) / SAMPLES
        parts[f"decode the {name}"] = (time.process_time() - between) / SAMPLES
    return parts


if __name__ == "__main__":
    configure_logs("warning", "auto", EXECUTOR, 0)
    uvloop.run(answer(sys.argv[1]))

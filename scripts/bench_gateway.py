"""CPU time of a gateway per server-sent event, with its mesh played by this script.

    python scripts/bench_gateway.py [--streams 64] [--tokens 200] [--interval 0.01]

Every iteration brings one token for each stream, as one message, as a detokenizer sends them.
"""

# ruff: noqa: ASYNC110 - what is waited for here has no event
from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import uvloop

from shared.codec import Identity
from shared.mesh import Mesh, MeshAddress
from shared.messages import Accepted, Credit, Deltas, Finished, Generate, Message
from shared.settings import Settings
from shared.types import FinishReason, RequestId, ServiceName, int32s

TEXT = " token"
PROBE = "ready?"


class Detokenizer:
    """Accepts what comes, and sends tokens to all at once."""

    def __init__(self, directory: str) -> None:
        self.requests: list[RequestId] = []
        self.meshes = {
            service: Mesh(service, _address(service, directory), [ServiceName.GATEWAY])
            for service in (
                ServiceName.TOKENIZER,
                ServiceName.SCHEDULER,
                ServiceName.DETOKENIZER,
            )
        }

    async def run(self) -> None:
        for mesh in self.meshes.values():
            mesh.open(self._on_message, lambda *peer: None, lambda *peer: None)
        await asyncio.gather(*(mesh.discover() for mesh in self.meshes.values()))

    def say(self, message: Message, service: ServiceName = ServiceName.DETOKENIZER) -> bool:
        return self.meshes[service].send(ServiceName.GATEWAY, "gateway.0", message)

    def tokens(self, number: int, last: bool) -> None:
        """Token `number` (from 0) of every request."""
        count = len(self.requests)
        reason = FinishReason.LENGTH
        ends = [Finished(one, reason, number + 1) for one in self.requests] if last else []
        offsets, counts = [number * len(TEXT)] * count, [number + 1] * count
        self.say(Deltas(self.requests, [TEXT] * count, int32s(offsets), int32s(counts), ends))

    def _on_message(self, message: Message, sender: Identity) -> None:
        if isinstance(message, Generate):
            self.say(Accepted(message.request_id, 3, "scheduler.0"))
            if message.prompt.text == PROBE:
                end = Finished(message.request_id, FinishReason.LENGTH, 1)
                self.say(Deltas([], [], int32s(), int32s(), [end]))
            else:
                self.requests.append(message.request_id)


def _address(service: ServiceName, directory: str) -> MeshAddress:
    return MeshAddress.from_settings(service, Settings(mesh=f"ipc:{directory}"))


async def _post(port: int, chat: bool) -> int:
    """Stream one answer; returns the number of events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": "x"}]
    prompt = {"messages": messages} if chat else {"prompt": "x"}
    body = json.dumps({**prompt, "stream": True, "max_tokens": 100_000}).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    events = 0
    while chunk := await reader.read(65536):
        events += chunk.count(b"data: ")
    writer.close()
    return events - 1  # [DONE]


async def _measure(arguments: argparse.Namespace, directory: str, port: int, pid: int) -> None:
    mesh = Detokenizer(directory)
    running = asyncio.create_task(mesh.run())
    credit = Credit(max_num_seqs=4096, max_queue=0, running=0, waiting=0)
    while not mesh.say(credit, ServiceName.SCHEDULER):
        await asyncio.sleep(0.01)
    while not await _ready(port):
        await asyncio.sleep(0.05)
    gateway = psutil.Process(pid)
    clients = [asyncio.create_task(_post(port, arguments.chat)) for _ in range(arguments.streams)]
    while len(mesh.requests) < arguments.streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    before, began = gateway.cpu_times(), time.perf_counter()
    for number in range(arguments.tokens):
        mesh.tokens(number, last=number == arguments.tokens - 1)
        behind = began + (number + 1) * arguments.interval - time.perf_counter()
        await asyncio.sleep(max(behind, 0))
    events = sum(await asyncio.gather(*clients))
    wall, after = time.perf_counter() - began, gateway.cpu_times()
    user, system = after.user - before.user, after.system - before.system
    tokens = arguments.streams * arguments.tokens
    print(
        f"{tokens} tokens, {events} events in {wall:.2f} s: {tokens / wall:.0f} tokens/s, "
        f"{(user + system) / tokens * 1e6:.1f} us CPU per token "
        f"({user / tokens * 1e6:.1f} user, {system / tokens * 1e6:.1f} system)"
    )
    running.cancel()


async def _ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--interval", type=float, default=0.01, help="seconds per iteration")
    parser.add_argument("--port", type=int, default=18765)
    parser.add_argument("--chat", action="store_true")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="headrace-") as directory:
        config = {"vocab_size": 1000, "max_position_embeddings": 200_000}
        Path(directory, "config.json").write_text(json.dumps(config))
        words = ["--mesh", f"ipc:{directory}", "--model", directory, "--log-level", "warning"]
        words += ["--port", str(arguments.port)]
        process = subprocess.Popen([sys.executable, "-P", "-m", "services.gateway", *words])
        try:
            uvloop.run(_measure(arguments, directory, arguments.port, process.pid))
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()

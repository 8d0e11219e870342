"""A server without any overlap: all services in one process and one thread, each after the other.

    .venv/bin/python scripts/one_process.py [the flags of `headrace serve`]

It is what `bench_overlap` compares with: plan, compute, detokenize, write, and only then plan
again, as servers did before they overlapped anything. The services are the real ones. What differs
is that no message leaves the process, and that the executor computes on the event loop, once
everything else that can be done is done.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace

import uvloop

from services.detokenizer.service import DetokenizerService
from services.gateway.service import GatewayService
from services.launcher.listener import base_url, http_listener
from services.launcher.models import prepare_model
from services.launcher.readiness import wait_ready
from services.launcher.serve import FIXED
from services.model_executor.service import ModelExecutorService
from services.model_executor.worker import Job, Worker
from services.scheduler.service import SchedulerService
from services.tokenizer.service import TokenizerService
from shared.codec import decode, encode
from shared.logs import configure_logs
from shared.mesh import Mesh, MeshAddress
from shared.mesh.mesh import Handle, PeerEvent
from shared.mesh.resolver import StaticList
from shared.messages import Announce, Message
from shared.service import Service
from shared.settings import Settings, parse_settings
from shared.types import ServiceName

WRITING_TURNS = 10  # of the loop, until what the last iteration led to is written; two do


class LocalMesh(Mesh):
    """Delivers to the other services of this process.

    Messages are encoded and decoded all the same, so that no two services hold one object.
    """

    def __init__(self, kind: type[Service], all_of_them: dict[ServiceName, LocalMesh]) -> None:
        address = MeshAddress(f"{kind.service}.0", "", StaticList({}))
        super().__init__(kind.service, address, kind.talks_to)
        self._talks_to = kind.talks_to
        self._all = all_of_them
        self._all[kind.service] = self

    def open(self, handle: Handle, joined: PeerEvent, lost: PeerEvent) -> None:
        self._handle, self._joined = handle, joined

    def close(self) -> None:
        pass

    async def discover(self) -> None:
        for service in self._talks_to:
            self._joined(service, self._all[service].identity.name)

    def peers(self, service: ServiceName) -> list[str]:
        return [self._all[service].identity.name]

    def send(self, service: ServiceName, name: str, message: Message) -> bool:
        frame = encode(message, self.identity, time.monotonic_ns())
        asyncio.get_running_loop().call_soon(self._all[service]._on_frame, frame)
        return True

    def broadcast(self, service: ServiceName, message: Message) -> None:
        self.send(service, "", message)

    def _on_frame(self, frame: bytes) -> None:
        message, sender, _ = decode(frame)
        self._handle(message, sender)


class InlineWorker(Worker):
    """Computes on the event loop; whatever else is ready there goes first."""

    async def start(self) -> Announce:
        self._runner = self._load()
        return self._runner.announce()

    def submit(self, job: Job) -> bool:
        self._wait(WRITING_TURNS, job)
        return True

    def close(self) -> None:
        pass

    def _wait(self, turns: int, job: Job) -> None:
        if turns:
            self._loop.call_soon(self._wait, turns - 1, job)
        else:
            self._compute(self._runner, replace(job, arrived=time.monotonic()))


class InlineExecutorService(ModelExecutorService):
    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        super().__init__(settings, mesh)
        self._worker = InlineWorker(self._load, self._done, lambda error: self.fail(error, ""))


KINDS: list[type[Service]] = [
    *(TokenizerService, SchedulerService, InlineExecutorService, DetokenizerService),
    GatewayService,  # the last: a signal is told to it
]


async def serve(settings: Settings, url: str) -> None:
    """Run until one of the services ends."""
    began = time.monotonic()
    meshes: dict[ServiceName, LocalMesh] = {}
    services = [kind(settings, LocalMesh(kind, meshes)) for kind in KINDS]
    running = [asyncio.create_task(service.run()) for service in services]
    await wait_ready(url, say)
    say(f"ready after {time.monotonic() - began:.1f} s at {url}/v1")
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    settings = parse_settings(None, sys.argv[1:], os.environ, **FIXED)
    settings = replace(settings, model=str(prepare_model(settings.model, say)))
    configure_logs(settings.log_level, settings.log_format, ServiceName.GATEWAY, 0)
    with http_listener(settings) as listener:
        settings = replace(settings, listen_fd=listener.fileno())
        uvloop.run(serve(settings, base_url(listener)))
        os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    main()

"""A service with nothing to do but what a test tells it, as a process of its own.

`Abort` serves as the message for everything: its request id is a command. Faults that cannot be
commanded, because they come before or after all messages, are named by the variable TINY_FAULT.
"""

from __future__ import annotations

import asyncio
import os
import time

from shared.codec import Identity
from shared.mesh import Mesh
from shared.messages import Abort, Message
from shared.service import Service, StartError, main
from shared.settings import Settings
from shared.types import RequestId, ServiceName

FAULT = os.environ.get("TINY_FAULT")


class Fault(Exception):
    """On purpose."""


def fault(where: str) -> None:
    raise Fault(where)


async def failing_task() -> None:
    await asyncio.sleep(0)
    fault("task")


class TinyService(Service):
    service = ServiceName.TOKENIZER
    talks_to = frozenset({ServiceName.GATEWAY})

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        super().__init__(settings, mesh)
        self._busy = False
        if FAULT == "init":
            fault("init")

    async def start(self) -> None:
        if FAULT == "start":
            fault("start")
        if FAULT == "setting":
            raise StartError("the model is made of cheese")
        if FAULT == "slow start":
            await asyncio.to_thread(time.sleep, 600)

    async def stop(self) -> None:
        if FAULT == "stop":
            fault("stop")

    @property
    def busy(self) -> bool:
        return self._busy

    def drain(self) -> None:
        self.mesh.broadcast(ServiceName.GATEWAY, Abort(RequestId("draining"), ""))

    def handle(self, message: Message, sender: Identity) -> None:
        assert isinstance(message, Abort)
        match message.request_id:
            case "handle":
                fault("handle")
            case "task":
                self.spawn(failing_task(), name="unlucky")
            case "callback":
                asyncio.get_running_loop().call_soon(fault, "callback")
            case "busy" | "free":
                self._busy = message.request_id == "busy"
            case "hang":
                time.sleep(600)
            case "compute":
                asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
        self.mesh.send(sender.service, sender.name, message)

    def peer_joined(self, service: ServiceName, name: str) -> None:
        if FAULT == "joined":
            fault("joined")

    def peer_lost(self, service: ServiceName, name: str) -> None:
        if FAULT == "lost":
            fault("lost")


if __name__ == "__main__":
    main(TinyService)

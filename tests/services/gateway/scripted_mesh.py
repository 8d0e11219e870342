"""A gateway over a real mesh whose other services are played by the test."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx

from services.gateway.collector import Choice
from services.gateway.service import GatewayService
from shared.codec import Identity
from shared.mesh import Mesh, MeshAddress
from shared.messages import (
    Accepted,
    Credit,
    Deltas,
    Failure,
    Finished,
    Generate,
    Message,
    MetricsReply,
    MetricsRequest,
    TokenDetails,
)
from shared.settings import Settings
from shared.types import FinishReason, ServiceName, int32s

PATIENCE = 20.0  # seconds until a test that waits in vain is told so
VOCAB_SIZE, MAX_MODEL_LEN = 1000, 256
CREDIT = Credit(max_num_seqs=8, max_queue=8, running=0, waiting=0)
MODEL = "tiny"

Kind = TypeVar("Kind")
Value = TypeVar("Value")


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something in this process has become true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


class Peer:
    """One instance of a service: keeps what it hears, says what the test wants said."""

    def __init__(self, service: ServiceName, directory: str, index: int = 0) -> None:
        settings = Settings(mesh=f"ipc:{directory}", index=index)
        self.mesh = Mesh(service, MeshAddress.from_settings(service, settings), ServiceName)
        self.heard: defaultdict[type, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self.answer_metrics: str | None = None  # the exposition to answer with; None: silence
        self.react: Callable[[Message, Identity], bool] = lambda message, sender: False

    async def hear(self, kind: type[Kind]) -> Kind:
        """The next message of this kind that `react` has not dealt with."""
        message: Kind = await asyncio.wait_for(self.heard[kind].get(), PATIENCE)
        return message

    def tell(self, message: Message, gateway: str = "gateway.0") -> None:
        assert self.mesh.send(ServiceName.GATEWAY, gateway, message)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Peer]:
        self.mesh.open(self._on_message, self._on_peer, self._on_peer)
        discovery = asyncio.create_task(self.mesh.discover())
        try:
            yield self
        finally:
            discovery.cancel()
            await asyncio.gather(discovery, return_exceptions=True)
            self.mesh.close()

    def _on_message(self, message: Message, sender: Identity) -> None:
        if isinstance(message, MetricsRequest) and self.answer_metrics is not None:
            self.tell(MetricsReply(message.request_id, self.answer_metrics), sender.name)
        elif not self.react(message, sender):
            self.heard[type(message)].put_nowait(message)

    def _on_peer(self, service: ServiceName, name: str) -> None:
        """Joins and losses show in `mesh.peers`."""


class ScriptedMesh:
    """Answers the gateway's probe by itself; the rest is the test's, or goes by `autopilot`."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.exits = AsyncExitStack()
        self.gateways: list[GatewayService] = []
        self.probes: list[Generate] = []
        self.answer_probes = True
        self.autopilot = False
        self._offsets: defaultdict[str, int] = defaultdict(int)
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._lives: dict[Peer, AsyncExitStack] = {}
        self._tasks: list[asyncio.Task[int]] = []

    # --- who is there

    async def start(self, service: ServiceName, index: int = 0) -> Peer:
        peer = Peer(service, self.directory, index)
        life = await self.exits.enter_async_context(AsyncExitStack())
        await life.enter_async_context(peer.running())
        self._lives[peer] = life
        if service is ServiceName.TOKENIZER:
            peer.react = self._on_generate
        return peer

    async def kill(self, peer: Peer) -> None:
        await self._lives[peer].aclose()

    async def start_all(self) -> None:
        """One of each service, known to the gateway and knowing it."""
        self.tokenizer = await self.start(ServiceName.TOKENIZER)
        self.scheduler = await self.start(ServiceName.SCHEDULER)
        self.detokenizer = await self.start(ServiceName.DETOKENIZER)
        self.executor = await self.start(ServiceName.MODEL_EXECUTOR)
        for peer in self.peers:
            await self.met(peer)
        self.scheduler.tell(CREDIT)

    @property
    def peers(self) -> list[Peer]:
        return [self.tokenizer, self.scheduler, self.detokenizer, self.executor]

    def adopt(self, peer: Peer) -> None:
        """Let this one play its service's part from now on."""
        name = peer.mesh.identity.service.removeprefix("model-")
        setattr(self, name, peer)

    def ended(self, gateway: int = 0) -> bool:
        return self._tasks[gateway].done()

    async def met(self, peer: Peer, gateway: int = 0) -> None:
        """Wait until this peer and a gateway see each other."""
        mesh, name = peer.mesh, f"gateway.{gateway}"
        await until(lambda: name in mesh.peers(ServiceName.GATEWAY))
        identity = mesh.identity
        seen = self.gateways[gateway].mesh
        await until(lambda: identity.name in seen.peers(identity.service))

    async def start_gateway(self, model: Path, index: int = 0, **settings: Any) -> str:
        """Run a gateway; returns its address."""
        own = Settings(
            mesh=f"ipc:{self.directory}",
            index=index,
            model=str(model),
            port=0,
            **{"served_model_name": [MODEL], **settings},
        )
        address = MeshAddress.from_settings(ServiceName.GATEWAY, own)
        mesh = Mesh(ServiceName.GATEWAY, address, GatewayService.talks_to)
        gateway = GatewayService(own, mesh)
        task = asyncio.create_task(gateway.run())
        self.exits.push_async_callback(_end, task)
        self.gateways.append(gateway)
        self._tasks.append(task)
        await until(lambda: bool(gateway.urls) or task.done())
        return gateway.urls[0]

    def choices(self) -> list[Choice]:
        """Those of the one request that is in flight."""
        (flight,) = {one.flight for one in self.gateways[0]._flights._sequences.values()}
        return flight.collector.choices

    # --- what the mesh answers

    def accept(self, request: Generate, prompt_tokens: int = 3) -> None:
        name = self.scheduler.mesh.identity.name
        self.detokenizer.tell(
            Accepted(request.request_id, prompt_tokens, name), request.route.gateway
        )

    def delta(
        self,
        request: Generate,
        text: str,
        finish: FinishReason = FinishReason.NONE,
        stop_reason: str | int | None = None,
        details: Sequence[TokenDetails] = (),
    ) -> None:
        """One token's text, and the end of the request if it has one."""
        key = request.request_id
        self._counts[key] += 1
        ends = [Finished(key, finish, self._counts[key], stop_reason)] if finish else []
        self.detokenizer.tell(
            Deltas(
                [key],
                [text],
                int32s([self._offsets[key]]),
                int32s([self._counts[key]]),
                ends,
                list(details),
            ),
            request.route.gateway,
        )
        self._offsets[key] += len(text)

    def fail(self, request: Generate, failure: Failure) -> None:
        end = Finished(request.request_id, FinishReason.ERROR, 0, failure=failure)
        self.detokenizer.tell(Deltas([], [], int32s(), int32s(), [end]), request.route.gateway)

    def answer(self, request: Generate) -> None:
        """Words up to max_tokens; the first tells the seed."""
        self.accept(request)
        total = request.params.max_tokens or 4
        for number in range(1, total + 1):
            last = FinishReason.LENGTH if number == total else FinishReason.NONE
            text = f"seed{request.params.seed}" if number == 1 else f" word{number}"
            self.delta(request, text, last)

    def _on_generate(self, message: Message, sender: Identity) -> bool:
        if not isinstance(message, Generate):
            return False
        if message.prompt.text == "ready?":
            self.probes.append(message)
            if self.answer_probes:
                self.answer(message)
            return True
        if self.autopilot:
            self.answer(message)
        return self.autopilot


async def _end(task: asyncio.Task[int]) -> None:
    task.cancel()
    result = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result[0], asyncio.CancelledError | int), result


@asynccontextmanager
async def scripted_mesh() -> AsyncIterator[ScriptedMesh]:
    with TemporaryDirectory(prefix="headrace-") as directory:  # tmp_path can be too long for ipc
        mesh = ScriptedMesh(directory)
        async with mesh.exits:
            yield mesh


@asynccontextmanager
async def background(work: Coroutine[Any, Any, Value]) -> AsyncIterator[asyncio.Task[Value]]:
    """Let something go on while the test plays the mesh; it ends with the block at the latest."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def events_of(body: str) -> list[Any]:
    """The JSON of each event of a stream; "[DONE]" as it is."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def wait_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

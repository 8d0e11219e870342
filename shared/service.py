"""What all services have in common: the loop, signals, the mesh, supervised tasks, and the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import setproctitle
import structlog
import uvloop
import zmq
from prometheus_client import CollectorRegistry

from shared.codec import Identity
from shared.directions import expected
from shared.inspection import Inspection, Question
from shared.logs import configure_logs
from shared.mesh import Mesh, MeshAddress
from shared.messages import Message
from shared.metrics import ProcessCollector
from shared.pulse import PULSE_VARIABLE, Pulse
from shared.settings import BadSetting, Settings, parse_settings
from shared.trace import NONE, Trace
from shared.types import EXIT_BAD_SETTING, EXIT_FAULT, ServiceName, State
from shared.watchdog import Watchdog

LIFELINE_VARIABLE = "HEADRACE_LIFELINE_FD"  # a pipe whose other end the launcher holds
DRAIN_CHECK_SECONDS = 0.05  # only while draining
QUIET_SECONDS = 0.25  # without work, until what was sent before we were known to leave has come

A = TypeVar("A")
B = TypeVar("B")


class StartError(Exception):
    """A service cannot start, for a reason its user can mend; the text is one clear line."""


class Service:
    """Base of every service: subclasses say whom they talk to and what they do with a message.

    All methods run on the event loop and must be quick; whatever blocks goes to a thread.
    """

    service: ClassVar[ServiceName]
    talks_to: ClassVar[frozenset[ServiceName]]

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        self.owns_process = False  # nothing else runs in it
        self.settings = settings
        self.mesh = mesh
        self.log = structlog.get_logger(self.service.value)
        self.trace = Trace()
        self.registry = CollectorRegistry()
        self.registry.register(ProcessCollector(mesh.identity))
        self.registry.register(mesh.registry)
        self.inspection = Inspection(mesh, self.registry, self.trace, lambda: self.load)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beats = 0
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Load what is needed. The inbox is bound already; raises StartError."""

    def handle(self, message: Message, sender: Identity) -> None:
        """Act on a message."""

    def peer_joined(self, service: ServiceName, name: str) -> None:
        """A link to this instance is up."""

    def peer_leaving(self, service: ServiceName, name: str) -> None:
        """This instance takes nothing new: `mesh.peers` is without it, `mesh.present` is not."""

    def peer_lost(self, service: ServiceName, name: str) -> None:
        """The link to this instance broke; what was queued for it is gone."""

    @property
    def load(self) -> Mapping[str, float]:
        """What its status says of its work, by name."""
        return {}

    @property
    def busy(self) -> bool:
        """Whether there is work that a drain should wait for."""
        return False

    def drain(self) -> None:
        """SIGTERM came: take nothing new."""

    def count(self) -> int:
        """Another number each time, unless what should go on stands still."""
        self._beats += 1
        return self._beats

    async def stop(self) -> None:
        """Give back what `start` took."""

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run a task whose exception ends the service."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def fail(self, error: BaseException, where: str) -> None:
        """End the service: after an unforeseen exception its state cannot be trusted."""
        self.log.error("service failed", where=where, exc_info=error)
        self._end(EXIT_FAULT)

    async def run(self) -> int:
        """Live until a signal or a fault; returns the exit code."""
        self.mesh.open(self._on_message, self._on_joined, self._on_lost, self._on_leaving)
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self.spawn(self.mesh.discover(), name="discover")
        self.spawn(self._start(), name="start")
        self._watch_signals()
        self._begin_pulse()
        try:
            return await self._ended
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            try:
                await self.stop()
            finally:
                self.mesh.close()

    async def _start(self) -> None:
        try:
            await self.start()
            if self.owns_process:
                _keep_for_good()
            if self.inspection.state is State.LOADING:
                self.inspection.state = State.READY
            self.log.info("started", name=self.mesh.identity.name)
        except StartError as error:
            self.log.error("cannot start", reason=str(error))
            self._end(EXIT_BAD_SETTING)

    def _on_message(self, message: Message, sender: Identity) -> None:
        if not expected(message, sender.service, self.service):
            self.mesh.misdirected(message, sender)
            return
        began = time.monotonic_ns()
        if isinstance(message, Question):
            self._guarded(self.inspection.answer, message, sender)
        else:
            self._guarded(self.handle, message, sender)
        self.trace.span(type(message).__name__, began, getattr(message, "step", NONE))

    def _on_joined(self, service: ServiceName, name: str) -> None:
        self._guarded(self.peer_joined, service, name)

    def _on_leaving(self, service: ServiceName, name: str) -> None:
        self._guarded(self.peer_leaving, service, name)

    def _on_lost(self, service: ServiceName, name: str) -> None:
        self._guarded(self.peer_lost, service, name)

    def _guarded(self, act: Callable[[A, B], None], first: A, second: B) -> None:
        """Call it; an exception ends the service, and nothing is called after the end."""
        if self._ended.done():
            return
        try:
            act(first, second)
        except Exception as error:
            self.fail(error, f"{act.__name__}({type(first).__name__})")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback failed; what transports report instead is the network's fault, not ours."""
        error = context.get("exception")
        if "handle" in context and error is not None:
            self.fail(error, context["message"])
        else:
            loop.default_exception_handler(context)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error, f"task {task.get_name()}")

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        lifeline = os.environ.get(LIFELINE_VARIABLE)
        if lifeline is not None:
            loop.add_reader(int(lifeline), self._orphaned)

    def _begin_pulse(self) -> None:
        """For the launcher, if one started us; it ends with the loop."""
        descriptor = os.environ.get(PULSE_VARIABLE)
        if descriptor is not None:
            Pulse(int(descriptor), self.count)

    def _on_signal(self, number: signal.Signals) -> None:
        loop = asyncio.get_running_loop()
        for again in (signal.SIGTERM, signal.SIGINT):  # the second one ends it at once
            loop.add_signal_handler(again, self._end, 128 + again)
        self.log.info("draining", signal=number.name)
        self.inspection.state = State.LEAVING
        self.mesh.withdraw()
        self.drain()
        self.spawn(self._drain_and_end(), name="drain")

    async def _drain_and_end(self) -> None:
        loop = asyncio.get_running_loop()
        busy_at = loop.time()
        limit = busy_at + self.settings.drain_timeout
        while loop.time() < min(limit, busy_at + QUIET_SECONDS):
            await asyncio.sleep(DRAIN_CHECK_SECONDS)  # `busy` is derived, not an event
            if self.busy:
                busy_at = loop.time()
        self._end(0)

    def _orphaned(self) -> None:
        """The launcher is gone, and with it whoever would clean up."""
        self.mesh.abandon()
        self._end(EXIT_FAULT)

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)


def _keep_for_good() -> None:
    """What is there by now stays: looking through it for garbage again and again would hold up
    whoever is served, for a fifth of a second where many modules are loaded."""
    gc.collect()
    gc.freeze()


async def _serve(kind: type[Service], settings: Settings) -> int:
    address = MeshAddress.from_settings(kind.service, settings)
    mesh = Mesh(kind.service, address, kind.talks_to)
    try:
        service = kind(settings, mesh)
        service.owns_process = True
        if PULSE_VARIABLE not in os.environ:  # no launcher would notice
            Watchdog(settings.hang_timeout, settings.iteration_timeout, service.count)
        return await service.run()
    except zmq.ZMQError as error:
        raise BadSetting(f"cannot bind {address.bind}: {error}") from error


def main(kind: type[Service], words: Sequence[str] | None = None) -> NoReturn:
    """Run one service as this process, by its flags and `HEADRACE_*`; ends the process."""
    try:
        settings = parse_settings(
            kind.service, sys.argv[1:] if words is None else words, os.environ
        )
        setproctitle.setproctitle(f"headrace: {kind.service} {settings.index}")
        configure_logs(settings.log_level, settings.log_format, kind.service, settings.index)
        # Never closed: that would wait for threads that are still computing.
        code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_serve(kind, settings))
    except BadSetting as error:
        print(f"headrace {kind.service}: {error}", file=sys.stderr)
        code = EXIT_BAD_SETTING
    except Exception as error:
        log = structlog.get_logger(kind.service.value)
        log.error("service failed", where="making or stopping it", exc_info=error)
        code = EXIT_FAULT
    sys.stderr.flush()
    os._exit(code)  # which does not wait for threads either

"""The model executor's messages: plans in, sampled tokens out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from services.model_executor.belonging import Belonging
from services.model_executor.metrics import ExecutorMetrics
from services.model_executor.worker import MAX_PLANS, Done, Job, Runner, Worker
from shared.codec import Identity
from shared.mesh import Mesh
from shared.messages import Announce, Message, Plan, Roster, Withdraw
from shared.model import read_model_info
from shared.rarely import Rarely
from shared.service import Service, StartError
from shared.settings import Settings, model_path
from shared.trace import nanoseconds
from shared.types import ServiceName
from shared.undelivered import Undelivered

MOVE_SECONDS = 5.0  # so long another scheduler must lack executors, before one with work moves


class ModelExecutorService(Service):
    """Serves one scheduler at a time, which it chooses by itself (`Belonging`).

    Its sessions are the links of the worker: each begins with an empty batch and an `Announce`.
    """

    service = ServiceName.MODEL_EXECUTOR
    talks_to = frozenset({ServiceName.SCHEDULER, ServiceName.DETOKENIZER, ServiceName.GATEWAY})

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        super().__init__(settings, mesh)
        self._path = model_path(settings)
        self._metrics = ExecutorMetrics(self.registry)
        self._worker = Worker(self._load, self._done, lambda error: self.fail(error, "compute"))
        self._worker.link = mesh.identity.incarnation >> 1  # no plan for a former life is run
        self._first_session = self._worker.link
        self._capacity: Announce | None = None  # None while the model loads
        self._belonging = Belonging(mesh.identity.name)
        self._scheduler: Identity | None = None  # whose plans are run
        self._move: asyncio.TimerHandle | None = None  # due when nothing else changes
        self._undelivered = Undelivered()
        self._drops = Rarely(self.service.value)
        self._idle_beats = 0

    def _load(self) -> Runner:
        try:
            info = read_model_info(self._path, self.settings.max_model_len)
        except ValueError as error:
            raise StartError(str(error)) from error
        if self.settings.device == "simulated":
            from services.model_executor.simulated import SimulatedBackend

            return SimulatedBackend(self.settings, info)
        # Here, because transformers takes seconds to import.
        from services.model_executor.runner import ModelRunner

        return ModelRunner(self.settings, info)

    async def start(self) -> None:
        self._capacity = await self._worker.start()
        self.log.info(
            "model loaded",
            fingerprint=self._capacity.fingerprint,
            blocks=self._capacity.num_blocks,
        )
        self._find_scheduler()

    async def stop(self) -> None:
        self._worker.close()

    @property
    def load(self) -> Mapping[str, float]:
        return {"iterations": self._worker.iterations, **self._metrics.seconds}

    @property
    def busy(self) -> bool:
        return self._scheduler is not None and self._worker.busy

    def count(self) -> int:
        """Stands still while one iteration goes on."""
        self._idle_beats += not self._worker.computing
        return self._worker.iterations + self._idle_beats

    def handle(self, message: Message, sender: Identity) -> None:
        if isinstance(message, Plan) and self._capacity is not None:
            self._plan(message, sender)
        elif isinstance(message, Roster):
            if self._belonging.hear(sender.name, message.executors):
                if self._scheduler is not None:  # what it had us hold is no good any more
                    self._drop_sequences()
                self._announce()
            self._find_scheduler()

    def peer_joined(self, service: ServiceName, name: str) -> None:
        for message in self._undelivered.claim(service, name):
            self.mesh.send(service, name, message)
        if service is ServiceName.SCHEDULER:
            self._find_scheduler()

    def peer_lost(self, service: ServiceName, name: str) -> None:
        self._undelivered.claim(service, name)
        if service is ServiceName.SCHEDULER:
            if self._belonging.lose(name):
                self._drop_sequences()
            self._find_scheduler()

    def _find_scheduler(self) -> None:
        """Join one if we have none, or one that has fewer executors, unless that passes by."""
        present = self.mesh.peers(ServiceName.SCHEDULER)
        if self._move is not None:
            self._move.cancel()
            self._move = None
        if self._capacity is None:
            return
        if self._belonging.scheduler is None:
            if (chosen := self._belonging.choose(present)) is not None:
                self._join(chosen)
        elif (better := self._belonging.better(present)) is not None:
            pause = MOVE_SECONDS if self.busy else 0.0
            self._move = asyncio.get_running_loop().call_later(pause, self._move_to, better)

    def _join(self, scheduler: str) -> None:
        self._belonging.join(scheduler)
        self._announce()

    def _move_to(self, scheduler: str) -> None:
        """What runs here is computed again by the others of the scheduler that we leave."""
        former = self._belonging.scheduler
        assert former is not None
        self.log.info("moving to another scheduler", scheduler=scheduler, former=former)
        self.mesh.send(ServiceName.SCHEDULER, former, Withdraw())
        self._drop_sequences()
        self._join(scheduler)

    def _announce(self) -> None:
        if self._capacity is not None and self._belonging.scheduler is not None:
            capacity = replace(self._capacity, session=self._worker.link)
            self.mesh.send(ServiceName.SCHEDULER, self._belonging.scheduler, capacity)

    def _plan(self, plan: Plan, sender: Identity) -> None:
        if sender.name != self._belonging.scheduler:
            self._drops.warning("plan of another scheduler dropped", scheduler=sender.name)
            self.mesh.send(ServiceName.SCHEDULER, sender.name, Withdraw())
            return
        if plan.session != self._worker.link:
            # Sent before it heard that there is nothing left to build on; or it takes us for
            # another, who used our name.
            if not self._first_session <= plan.session < self._worker.link:
                self._announce()
            return
        self._scheduler = sender
        if not self._worker.submit(Job(self._worker.link, sender.incarnation, plan)):
            self._misfit(f"more than {MAX_PLANS} plans wait")

    def _drop_sequences(self) -> None:
        self._worker.link += 1
        self._scheduler = None  # until it plans
        self._metrics.emptied()

    def _done(self, done: Done) -> None:
        if done.job.link != self._worker.link or self._scheduler is None:
            return
        if done.output is None:
            self._misfit(str(done.misfit))
            return
        heard = time.monotonic_ns()
        output, (began, ended) = done.output, map(nanoseconds, done.output.span)
        counts = (output.decode_tokens, output.prefill_tokens)
        self.trace.note("iteration", began, ended, output.scheduler.step, *counts)
        self._metrics.computed(output)
        self.mesh.send(ServiceName.SCHEDULER, self._scheduler.name, output.scheduler)
        for name, result in output.detokenizers.items():
            if not self.mesh.send(ServiceName.DETOKENIZER, name, result):
                self._undelivered.keep(ServiceName.DETOKENIZER, name, result)
        self.trace.span("send results", heard, output.scheduler.step)

    def _misfit(self, reason: str) -> None:
        """The scheduler and we disagree on the batch: both start over with an empty one."""
        assert self._scheduler is not None
        self._metrics.misfits.inc()
        self.log.error("plan does not fit", scheduler=self._scheduler.name, reason=reason)
        self._drop_sequences()
        self._announce()

"""The scheduler's messages: `Submit`, `Abort`, `Announce` and `StepResult` in, plans out."""

from __future__ import annotations

import asyncio
import time

from services.scheduler.core import NO_EXECUTOR, POISON, SchedulerCore
from services.scheduler.metrics import SchedulerCollector, queue_time_histogram
from services.scheduler.sequence import Sequence
from shared.codec import Identity
from shared.mesh import Mesh
from shared.messages import (
    Abort,
    Admitted,
    Announce,
    Credit,
    Failed,
    Failure,
    Message,
    Open,
    Plan,
    Refused,
    StepResult,
    Submit,
)
from shared.service import Service
from shared.settings import Settings
from shared.types import ServiceName

EXECUTOR_GRACE_SECONDS = 60.0  # how long requests wait for a new executor after one was lost


class SchedulerService(Service):
    """One scheduler with one executor: the first that announces itself."""

    service = ServiceName.SCHEDULER
    talks_to = frozenset({ServiceName.MODEL_EXECUTOR, ServiceName.DETOKENIZER, ServiceName.GATEWAY})

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        super().__init__(settings, mesh)
        self._loop = asyncio.get_running_loop()
        self._core = SchedulerCore(
            settings.max_queue,
            self._loop.time,
            run_ahead=settings.run_ahead,
            max_lease=settings.max_lease,
            prefix_caching=settings.enable_prefix_caching,
            max_decode_slowdown=settings.max_decode_slowdown,
        )
        self._executor: Identity | None = None
        self._candidates: dict[str, tuple[Identity, Announce]] = {}  # executors not in use
        self._credit: Credit | None = None
        self._turn_due = False
        self._grace: asyncio.TimerHandle | None = None
        self._queue_time = queue_time_histogram(self.registry)
        self.registry.register(SchedulerCollector(self._core))

    @property
    def busy(self) -> bool:
        return self._core.num_requests > 0

    def handle(self, message: Message, sender: Identity) -> None:
        match message:
            case StepResult():
                if sender == self._executor and message.epoch == self.mesh.identity.incarnation:
                    self._core.apply(message)
            case Submit():
                self._submit(message)
            case Abort():
                self._core.abort(message.request_id)
            case Announce():
                self._announced(message, sender)
        self._take_turn_soon()

    def peer_joined(self, service: ServiceName, name: str) -> None:
        if service is ServiceName.GATEWAY and self._credit is not None:
            self.mesh.send(service, name, self._credit)
        elif service is ServiceName.MODEL_EXECUTOR:
            self._choose_executor()
        self._take_turn_soon()

    def peer_lost(self, service: ServiceName, name: str) -> None:
        if service is ServiceName.MODEL_EXECUTOR:
            self._candidates.pop(name, None)
            if self._executor is not None and self._executor.name == name:
                self._executor_lost()
        elif service is ServiceName.GATEWAY:
            dropped = self._core.abort_where(lambda sequence: sequence.route.gateway == name)
            for sequence in dropped:
                abort = Abort(sequence.request_id, "the gateway was lost")
                self.mesh.send(ServiceName.DETOKENIZER, sequence.route.detokenizer, abort)
        else:  # the gateway sees the loss too, and tells the clients
            self._core.abort_where(lambda sequence: sequence.route.detokenizer == name)
        self._take_turn_soon()

    def _submit(self, request: Submit) -> None:
        outcome: Sequence | Failure | None
        if request.route.detokenizer not in self.mesh.peers(ServiceName.DETOKENIZER):
            outcome = Failure(503, "the detokenizer is not connected", code="service_unavailable")
        else:
            outcome = self._core.submit(request)
        if isinstance(outcome, Failure):
            refused = Refused(request.request_id, outcome)
            self.mesh.send(ServiceName.GATEWAY, request.route.gateway, refused)
        elif outcome is not None:
            self.mesh.send(
                ServiceName.DETOKENIZER,
                request.route.detokenizer,
                Open(
                    request_id=outcome.request_id,
                    handle=outcome.handle,
                    gateway=request.route.gateway,
                    token_ids=request.token_ids,
                    params=outcome.params,
                ),
            )

    def _announced(self, capacity: Announce, executor: Identity) -> None:
        self._candidates[executor.name] = (executor, capacity)
        if self._executor is not None and self._executor.name == executor.name:
            # It started anew, or dropped its state: either way nothing that ran there is left.
            self._executor_lost()
        self._choose_executor()

    def _choose_executor(self) -> None:
        """Take the first candidate that can be sent plans and whose model fits."""
        linked = self.mesh.peers(ServiceName.MODEL_EXECUTOR)
        for name in [name for name in self._candidates if name in linked]:
            if self._executor is None:
                self._try_executor(*self._candidates.pop(name))

    def _try_executor(self, executor: Identity, capacity: Announce) -> None:
        try:
            misfits = self._core.connect(capacity)
        except ValueError as error:
            self.log.error("executor refused", executor=executor.name, reason=str(error))
            return
        self._executor = executor
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self.log.info("executor connected", executor=executor.name, blocks=capacity.num_blocks)
        for sequence, failure in misfits:
            self._failed(sequence, failure)

    def _executor_lost(self) -> None:
        assert self._executor is not None
        self.log.warning(
            "executor lost, its requests will be computed again",
            executor=self._executor.name,
            requests=self._core.num_running,
        )
        self._executor = None
        for sequence in self._core.disconnect():
            self._failed(sequence, POISON)
        self._grace = self._loop.call_later(EXECUTOR_GRACE_SECONDS, self._give_up)
        self._choose_executor()

    def _give_up(self) -> None:
        """No executor came back in time."""
        self._grace = None
        for sequence in self._core.abort_where(lambda sequence: True):
            self._failed(sequence, NO_EXECUTOR)

    def _failed(self, sequence: Sequence, failure: Failure) -> None:
        self.mesh.send(
            ServiceName.DETOKENIZER,
            sequence.route.detokenizer,
            Failed(sequence.request_id, failure),
        )

    def _take_turn_soon(self) -> None:
        """Plan once after all messages that are there now, not once for each."""
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn_due = False
        began = time.monotonic_ns()
        while (plan := self._core.plan()) is not None:
            self._send_plan(plan)
            self.trace.span("plan", began, plan.step, rows=len(plan.row_slots))
            began = time.monotonic_ns()
        self._publish_credit()

    def _send_plan(self, plan: Plan) -> None:
        assert self._executor is not None
        for entering in plan.entering:
            sequence = self._core.running(entering.handle)
            name = "admitted" if sequence.admissions == 1 else "admitted again"
            self.trace.instant(name, plan.step, tokens=len(entering.token_ids))
            if sequence.admissions == 1:
                self._admitted(sequence)
        self.mesh.send(ServiceName.MODEL_EXECUTOR, self._executor.name, plan)

    def _admitted(self, sequence: Sequence) -> None:
        self._queue_time.observe(self._loop.time() - sequence.arrived)
        if sequence.num_cached or self.settings.otlp_traces_endpoint is not None:
            admitted = Admitted(sequence.request_id, sequence.num_cached)
            self.mesh.send(ServiceName.GATEWAY, sequence.route.gateway, admitted)

    def _publish_credit(self) -> None:
        core = self._core
        credit = Credit(
            max_num_seqs=core.max_num_seqs,
            max_queue=core.max_queue,
            running=core.num_running,
            waiting=len(core.waiting),
        )
        if credit != self._credit:
            self._credit = credit
            self.mesh.broadcast(ServiceName.GATEWAY, credit)

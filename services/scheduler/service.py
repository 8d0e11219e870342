"""The scheduler's messages: `Submit`, `Abort`, `Announce` and `StepResult` in, plans out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from services.scheduler.core import SchedulerCore
from services.scheduler.executors import Executors
from services.scheduler.metrics import SchedulerCollector, queue_time_histogram
from services.scheduler.openings import Openings
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
    Gone,
    Message,
    Plan,
    Recalled,
    Refused,
    Released,
    Reopen,
    Route,
    StepResult,
    Submit,
    Withdraw,
)
from shared.metrics import recoveries_counter, total
from shared.service import Service
from shared.settings import Settings
from shared.types import RequestId, ServiceName

GRACE_SECONDS = 60.0  # how long requests wait for a new executor or detokenizer

NO_EXECUTOR = Failure(503, "no model executor is connected", code="service_unavailable")
NO_DETOKENIZER = Failure(503, "no detokenizer is connected", code="service_unavailable")


class SchedulerService(Service):
    """One scheduler, and all executors that announce themselves to it."""

    service = ServiceName.SCHEDULER
    talks_to = frozenset(ServiceName) - {ServiceName.SCHEDULER}

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        super().__init__(settings, mesh)
        self._loop = asyncio.get_running_loop()
        self._core = SchedulerCore(
            settings.max_queue,
            self._loop.time,
            max_num_seqs=settings.max_num_seqs,
            run_ahead=settings.run_ahead,
            max_lease=settings.max_lease,
            prefix_caching=settings.enable_prefix_caching,
            max_decode_slowdown=settings.max_decode_slowdown,
        )
        self._openings = Openings(self._core, mesh)
        self._credit: Credit | None = None
        self._turn_due = False
        self._grace: asyncio.TimerHandle | None = None
        self._recoveries = recoveries_counter(self.registry)
        self._executors = Executors(self._core, mesh, self._failed, self._recoveries)
        self._queue_time = queue_time_histogram(self.registry)
        self.registry.register(SchedulerCollector(self._core, mesh.identity.name))

    @property
    def load(self) -> Mapping[str, float]:
        return {
            "running": self._core.fleet.num_running,
            "waiting": len(self._core.waiting),
            "slots": self._core.fleet.max_num_seqs,
            "kv_cache_usage": self._core.fleet.cache_usage,
            "tokens": self._core.counters.generation_tokens,
            "preemptions": self._core.counters.preemptions,
            "recoveries": total(self._recoveries),
        }

    @property
    def busy(self) -> bool:
        return self._core.num_requests > 0

    def handle(self, message: Message, sender: Identity) -> None:
        match message:
            case StepResult():
                ours = message.epoch == self.mesh.identity.incarnation
                if ours and self._executors.drives(sender):
                    self._core.apply(sender.name, message)
            case Submit():
                self._submit(message)
            case Abort():
                sequence = self._core.abort(message.request_id)
                if sequence is not None and sender.service is ServiceName.GATEWAY:
                    # Its own may have been lost with a link, and nobody would say it again.
                    self.mesh.send(ServiceName.DETOKENIZER, sequence.route.detokenizer, message)
            case Announce():
                self._executors.announced(message, sender)
            case Withdraw():
                self._executors.withdrew(sender.name)
            case Released():
                self._core.release(message.request_ids)
            case Recalled():
                self._core.recalled(message.number, sender.name)
            case Reopen():
                if not self._core.reopen(message.request_id, message.detokenizer):
                    self.mesh.send(sender.service, sender.name, Gone(message.request_id))
        self._take_turn_soon()

    def peer_joined(self, service: ServiceName, name: str) -> None:
        if service is ServiceName.MODEL_EXECUTOR:
            self._executors.joined(name)
        elif self._credit is not None:
            self.mesh.send(service, name, self._credit)
        self._take_turn_soon()

    def peer_leaving(self, service: ServiceName, name: str) -> None:
        if service is ServiceName.MODEL_EXECUTOR:
            self._executors.leaves(name)

    def peer_lost(self, service: ServiceName, name: str) -> None:
        if service is ServiceName.MODEL_EXECUTOR:
            self._executors.lost(name)
        elif service is ServiceName.GATEWAY:
            dropped = self._core.abort_where(lambda sequence: sequence.route.gateway == name)
            for sequence in dropped:
                abort = Abort(sequence.request_id, "the gateway was lost")
                self.mesh.send(ServiceName.DETOKENIZER, sequence.route.detokenizer, abort)
        elif service is ServiceName.DETOKENIZER and (moved := self._core.detokenizer_lost(name)):
            self._recoveries.labels(service).inc()
            self.log.warning(
                "detokenizer lost, its requests go to another", detokenizer=name, requests=moved
            )
        self._take_turn_soon()

    def _submit(self, request: Submit) -> None:
        outcome = self._core.submit(request)
        if isinstance(outcome, Failure):
            at_detokenizer = request.output_tokens is not None
            self._tell_end(request.request_id, request.route, outcome, opened=at_detokenizer)

    @property
    def _lacking(self) -> Failure | None:
        """What is missing for the requests that are here."""
        if self._core.stuck:
            return NO_EXECUTOR
        return NO_DETOKENIZER if self._openings.stuck else None

    def _consider_grace(self) -> None:
        """Let what is here wait for what is missing, but not for ever."""
        if self._lacking is None:
            if self._grace is not None:
                self._grace.cancel()
                self._grace = None
        elif self._grace is None:
            self._grace = self._loop.call_later(GRACE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """Nothing came back in time."""
        self._grace = None
        failure = self._lacking
        if failure is None:
            return
        for sequence in self._core.abort_where(
            lambda one: self._core.is_stuck(one) or not one.opened
        ):
            self._failed(sequence, failure)

    def _failed(self, sequence: Sequence, failure: Failure) -> None:
        self._tell_end(sequence.request_id, sequence.route, failure, opened=sequence.opened)

    def _tell_end(
        self, request_id: RequestId, route: Route, failure: Failure, *, opened: bool
    ) -> None:
        """Tell of a request that ended here, through its detokenizer if that knows of it."""
        if opened:
            failed = Failed(request_id, failure)
            self.mesh.send(ServiceName.DETOKENIZER, route.detokenizer, failed)
        else:
            self.mesh.send(ServiceName.GATEWAY, route.gateway, Refused(request_id, failure))

    def _take_turn_soon(self) -> None:
        """Plan once after all messages that are there now, not once for each."""
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn_due = False
        self._openings.catch_up()
        self._consider_grace()
        began = time.monotonic_ns()
        while plans := self._core.plan():
            for executor, plan in plans:
                self._send_plan(executor, plan)
                self.trace.span("plan", began, plan.step, rows=len(plan.row_slots))
                began = time.monotonic_ns()
        self._executors.tell()
        self._publish_credit()

    def _send_plan(self, executor: str, plan: Plan) -> None:
        for entering in plan.entering:
            sequence = self._core.sequence(entering.handle)
            name = "admitted" if sequence.fresh else "admitted again"
            self.trace.instant(name, plan.step, tokens=len(entering.token_ids))
            if sequence.fresh:
                self._admitted(sequence)
        self.mesh.send(ServiceName.MODEL_EXECUTOR, executor, plan)

    def _admitted(self, sequence: Sequence) -> None:
        self._queue_time.observe(self._loop.time() - sequence.arrived)
        if sequence.num_cached or self.settings.otlp_traces_endpoint is not None:
            admitted = Admitted(sequence.request_id, sequence.num_cached)
            self.mesh.send(ServiceName.GATEWAY, sequence.route.gateway, admitted)

    def _publish_credit(self) -> None:
        core = self._core
        credit = Credit(
            max_num_seqs=core.fleet.max_num_seqs,
            max_queue=core.max_queue,
            running=core.fleet.num_running,
            waiting=len(core.waiting),
        )
        former, self._credit = self._credit, credit
        if credit != former:
            self.mesh.broadcast(ServiceName.GATEWAY, credit)
            self.mesh.broadcast(ServiceName.TOKENIZER, credit)
        if former is None or credit.max_num_seqs != former.max_num_seqs:
            self.mesh.broadcast(ServiceName.DETOKENIZER, credit)

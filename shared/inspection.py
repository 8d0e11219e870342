"""What every service answers when it is asked how it is: its metrics, its trace, its status."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from shared.codec import Identity
from shared.mesh import Mesh
from shared.messages import (
    Figure,
    MetricsReply,
    MetricsRequest,
    Status,
    StatusReply,
    StatusRequest,
    TraceReply,
    TraceRequest,
)
from shared.metrics import exposition
from shared.trace import Trace, pack
from shared.types import State

Question = MetricsRequest | TraceRequest | StatusRequest
Answer = MetricsReply | TraceReply | StatusReply


class Inspection:
    """`load`: what there is to say of the work of this instance, by name."""

    def __init__(
        self,
        mesh: Mesh,
        registry: CollectorRegistry,
        trace: Trace,
        load: Callable[[], Mapping[str, float]],
    ) -> None:
        self.state = State.LOADING
        self._mesh = mesh
        self._registry = registry
        self._trace = trace
        self._load = load
        self._began = time.monotonic()

    @property
    def status(self) -> Status:
        figures = {**self._load(), **self._mesh.figures}
        return Status(
            self.state,
            socket.gethostname(),
            os.getpid(),
            time.monotonic() - self._began,
            [Figure(name, float(value)) for name, value in figures.items()],
        )

    def answer(self, question: Question, sender: Identity) -> None:
        self._mesh.send(sender.service, sender.name, self._answer(question))

    def _answer(self, question: Question) -> Answer:
        match question:
            case MetricsRequest():
                return MetricsReply(question.request_id, exposition(self._registry))
            case StatusRequest():
                return StatusReply(question.request_id, self.status)
            case TraceRequest():
                now = time.monotonic_ns()
                names, events = pack(self._trace.since(now - question.window))
                return TraceReply(question.request_id, now, names, events)

"""A sequence as the policy sees it, and the least engine that serves a queue of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from services.scheduler.policy import FairQueue
from shared.types import Handle

_handles = count(1)


@dataclass(slots=True, eq=False)
class Request:
    tenant: str = ""
    priority: int = 0
    arrived: float = 0.0
    prompt: int = 16  # tokens
    output: int = 1  # tokens
    admissions: int = 0
    generated: int = 0
    handle: Handle = field(default_factory=lambda: Handle(next(_handles)))


class Engine:
    """Slots, and an iteration that gives each of them a token."""

    def __init__(self, slots: int) -> None:
        self.queue: FairQueue[Request] = FairQueue()
        self.running: list[Request] = []
        self.served: dict[str, int] = {}  # weighted tokens, by tenant
        self._slots = slots

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.queue.append(request)

    def step(self) -> list[Request]:
        """One iteration; returns whom it admitted."""
        admitted = []
        while self.queue and len(self.running) < self._slots:
            request = self.queue.first
            self.queue.remove(request)
            self.charge(request.tenant, input_tokens=request.prompt)
            admitted.append(request)
            self.running.append(request)
        for request in self.running:
            request.generated += 1
            self.charge(request.tenant, output_tokens=1)
        self.running = [request for request in self.running if request.generated < request.output]
        return admitted

    def charge(self, tenant: str, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        self.queue.served(tenant, input_tokens=input_tokens, output_tokens=output_tokens)
        weighted = input_tokens + 2 * output_tokens
        self.served[tenant] = self.served.get(tenant, 0) + weighted

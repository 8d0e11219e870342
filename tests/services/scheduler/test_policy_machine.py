"""The fair queue under any history, beside a model that searches for the next one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.fairness import SPREAD, STEP
from services.scheduler.policy import AGEING_SECONDS, FairQueue
from tests.services.scheduler.policy_engine import Request

TENANTS = "abc"


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Request] = FairQueue()
        self.now = 0.0
        self.waiting: dict[Request, bool] = {}  # whether it was set back
        self.running: list[Request] = []
        self.counters = dict.fromkeys(TENANTS, 0)
        self.last_change: dict[str, int] = dict.fromkeys(TENANTS, 0)  # decides between equals
        self.changes = 0
        self.last_lift = 0
        self.last_to_wait = ""

    @property
    def backlogged(self) -> set[str]:
        return {request.tenant for request in self.waiting}

    @property
    def next_tenant(self) -> str:
        return min(self.backlogged, key=lambda t: (self.counters[t], self.last_change[t]))

    @property
    def expected(self) -> Request:
        def rank(request: Request) -> tuple[bool, float, int]:
            due = request.arrived + AGEING_SECONDS * request.priority
            return not self.waiting[request], due, request.handle

        line = [request for request in self.waiting if request.tenant == self.next_tenant]
        return min(line, key=rank)

    def changed(self, tenant: str) -> None:
        self.changes += 1
        self.last_change[tenant] = self.changes

    def wait(self, request: Request, *, set_back: bool) -> None:
        tenant = request.tenant
        if tenant not in self.backlogged:
            if self.backlogged:
                floor = self.counters[self.next_tenant]
                start = min(max(floor, self.last_lift) + STEP, floor + SPREAD)
            else:
                start = self.counters.get(self.last_to_wait, 0)
            if self.counters[tenant] < start:
                self.counters[tenant] = self.last_lift = start
            self.changed(tenant)
        self.waiting[request] = set_back

    def take_out(self, request: Request) -> None:
        self.queue.remove(request)
        del self.waiting[request]
        if request.tenant not in self.backlogged:
            self.last_to_wait = request.tenant

    @rule(
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(-2, 2),
        pause=st.sampled_from([0.0, 1.0, AGEING_SECONDS]),
    )
    def arrive(self, tenant: str, priority: int, pause: float) -> None:
        self.now += pause
        request = Request(tenant, priority, self.now)
        self.queue.append(request)
        self.wait(request, set_back=False)

    @precondition(lambda self: self.waiting)
    @rule(cost=st.integers(0, 300))
    def admit(self, cost: int) -> None:
        request = self.queue.first
        self.take_out(request)
        self.running.append(request)
        self.charge(request.tenant, cost)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def set_back(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.queue.put_back(request)
        self.wait(request, set_back=True)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.take_out(data.draw(st.sampled_from(list(self.waiting))))

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.integers(0, 300))
    def charge(self, tenant: str, tokens: int) -> None:
        if tenant in {request.tenant for request in [*self.waiting, *self.running]}:
            self.queue.served(tenant, input_tokens=tokens)
            self.counters[tenant] += tokens
            self.changed(tenant)

    @invariant()
    def the_next_is_the_right_one(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert bool(self.queue) == bool(self.waiting)
        if self.waiting:
            assert self.queue.first is self.expected

    def teardown(self) -> None:
        while self.queue:
            assert self.queue.first is self.expected
            self.take_out(self.queue.first)
        assert not self.waiting


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

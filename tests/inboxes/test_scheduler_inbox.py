"""Whatever reaches a scheduler's inbox, it goes on, and is right afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from scripts.frames import Pools
from services.scheduler.service import SchedulerService
from shared.messages import Announce, Open, Plan, Route, StepResult, Submit
from shared.sampling import SamplingParams
from shared.types import FinishReason, RequestId, ServiceName, int32s
from tests.conftest import Station
from tests.inboxes.subject import Subject, hear

GATEWAY, TOKENIZER, DETOKENIZER = (
    ServiceName.GATEWAY,
    ServiceName.TOKENIZER,
    ServiceName.DETOKENIZER,
)
SCHEDULER, EXECUTOR = ServiceName.SCHEDULER, ServiceName.MODEL_EXECUTOR
CAPACITY = Announce("f00d", 16, 4, 4, 32, 64, 1000)


class SchedulerUnderAttack(Subject):
    """With an executor, whose true epoch and steps an attack knows, as it does all handles."""

    kind = SchedulerService
    peers = (GATEWAY, TOKENIZER, DETOKENIZER, EXECUTOR)
    service: SchedulerService
    session = 0

    def pools(self) -> Pools:
        core = self.service._core
        last = max((engine.in_flight._last_step for engine in core.fleet.engines), default=0)
        return {
            "epoch": lambda: [self.service.mesh.identity.incarnation],
            "step": lambda: range(max(last - 3, 0), last + 2),
            "handle": lambda: list(core._by_handle),
            "position": lambda: [len(one.token_ids) for one in core._by_handle.values()],
            "request_id": lambda: [*core._known, RequestId("new")],
            "gateway": lambda: ["gateway.0"],
            "detokenizer": lambda: ["detokenizer.0"],
            **{field.name: _only(getattr(CAPACITY, field.name)) for field in fields(Announce)},
            "number": lambda: [core.recalls],
            "max_tokens": lambda: [None, 2, 5],
        }

    async def populate(self) -> None:
        """Each time an executor, and requests that it runs."""
        self.session += 1
        core = self.service._core
        executor, tokenizer = self.at[EXECUTOR], self.at[TOKENIZER]
        if not core.fleet.engines:
            executor.mesh.send(SCHEDULER, "scheduler.0", replace(CAPACITY, session=self.session))
        for number in range(3):
            params = SamplingParams(seed=1, max_tokens=20)
            name = RequestId(f"{self.session}-{number}")
            asked = Submit(name, int32s([5, 6, 7]), params, Route("gateway.0", "detokenizer.0"))
            tokenizer.mesh.send(SCHEDULER, "scheduler.0", asked)

    async def ask(self, at: dict[ServiceName, Station]) -> None:
        self.service._core.abort_where(lambda sequence: True)
        at[EXECUTOR].say(SCHEDULER, replace(CAPACITY, session=10**6))
        route = Route("gateway.0", "detokenizer.0")
        params = SamplingParams(seed=1, max_tokens=2)
        asked = Submit(RequestId("wanted"), int32s([5, 6, 7]), params, route)
        at[TOKENIZER].say(SCHEDULER, asked)
        opened = await hear(at[DETOKENIZER], Open)
        assert (opened.request_id, opened.token_ids) == ("wanted", asked.token_ids)
        for position, finish in ((3, FinishReason.NONE), (4, FinishReason.LENGTH)):
            plan = await hear(at[EXECUTOR], Plan)
            assert len(plan.row_slots) == 1
            epoch = self.service.mesh.identity.incarnation
            columns = int32s([opened.handle]), int32s([position]), int32s([9]), bytes([finish])
            at[EXECUTOR].say(SCHEDULER, StepResult(epoch, plan.step, *columns))
        assert list(plan.row_tokens) == [1]


def _only(value: Any) -> Callable[[], list[Any]]:
    return lambda: [value]


def test_a_scheduler_goes_on(model_dir: Path) -> None:
    with SchedulerUnderAttack(model_dir) as subject:
        subject.goes_on()

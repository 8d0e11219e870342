"""Whatever reaches a model executor's inbox, it goes on, and is right afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from scripts.frames import Pools
from services.model_executor.service import ModelExecutorService
from services.model_executor.worker import Runner
from shared.messages import Announce, StepResult
from shared.sampling import SamplingParams
from shared.types import Handle, ServiceName
from tests.conftest import Station, until
from tests.inboxes.subject import Subject, hear
from tests.services.model_executor.plan_maker import PlanMaker, Running

GATEWAY, SCHEDULER = ServiceName.GATEWAY, ServiceName.SCHEDULER
EXECUTOR, DETOKENIZER = ServiceName.MODEL_EXECUTOR, ServiceName.DETOKENIZER


class ExecutorUnderAttack(Subject):
    """An attack knows its session, so its plans are taken and run as far as they fit."""

    kind = ModelExecutorService
    peers = (GATEWAY, SCHEDULER, DETOKENIZER)
    flags: ClassVar = {
        "device": "simulated",
        "sim": "base=0",
        "num_gpu_blocks_override": 16,
        "max_num_seqs": 4,
        "block_size": 4,
        "max_model_len": 64,
    }
    service: ModelExecutorService
    backend: Any

    def pools(self) -> Pools:
        link = self.service._worker.link
        return {
            "session": lambda: [link, link, link + 1],
            "detokenizer": lambda: ["detokenizer.0"],
            "slot": lambda: [slot for slot in range(4) if slot not in self._taken],
            "taken": lambda: self._taken,
        }

    @property
    def _taken(self) -> list[int]:
        """Slots with sequences."""
        slots: list[int] = np.flatnonzero(self.backend._batch._taken).tolist()
        return slots

    def idle(self) -> bool:
        worker = self.service._worker
        return worker._jobs.empty() and not worker.computing

    def prepare(self) -> None:
        load = self.service._worker._load

        def loaded() -> Runner:
            self.backend = backend = load()
            return backend

        self.service._worker._load = loaded

    async def set_up(self) -> None:
        await self.at[SCHEDULER].next(Announce)
        self.expected = await self._answer(self.at[SCHEDULER])

    async def ask(self, at: dict[ServiceName, Station]) -> None:
        await until(lambda: self.service._scheduler is None)
        assert await self._answer(at[SCHEDULER]) == self.expected

    async def _answer(self, scheduler: Station) -> list[int]:
        capacity = self.service._capacity
        assert capacity is not None
        session = self.service._worker.link
        limits = replace(capacity, session=session)
        params = SamplingParams(seed=1, temperature=0.0, max_tokens=6)
        one = Running(Handle(5), 3, params, [504, 3575, 282], "detokenizer.0")
        maker = PlanMaker(limits)
        maker.enter(one)
        while maker.running:
            plan = maker.plan()
            scheduler.say(EXECUTOR, plan)
            maker.take_result(await hear(scheduler, StepResult))
        return one.outputs


def test_an_executor_goes_on(model_dir: Path) -> None:
    with ExecutorUnderAttack(model_dir) as subject:
        subject.goes_on()

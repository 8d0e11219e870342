"""Whatever reaches a gateway's inbox, it goes on, and is right afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import httpx

from scripts.frames import Pools
from services.gateway.service import GatewayService
from shared.messages import Accepted, Credit, Deltas, Finished, Generate
from shared.types import FinishReason, ServiceName, int32s
from tests.conftest import Station, until
from tests.inboxes.subject import Subject, hear

GATEWAY, TOKENIZER, DETOKENIZER = (
    ServiceName.GATEWAY,
    ServiceName.TOKENIZER,
    ServiceName.DETOKENIZER,
)
SCHEDULER, EXECUTOR = ServiceName.SCHEDULER, ServiceName.MODEL_EXECUTOR
CREDIT = Credit(max_num_seqs=64, max_queue=64, running=0, waiting=0)
OPEN_REQUESTS = 4


class GatewayUnderAttack(Subject):
    """With requests that only the attack answers: it knows their ids."""

    kind = GatewayService
    peers = (TOKENIZER, SCHEDULER, DETOKENIZER, EXECUTOR)
    flags: ClassVar = {"port": 0, "served_model_name": ["m"]}
    service: GatewayService

    def prepare(self) -> None:
        self.posting: set[asyncio.Task[httpx.Response]] = set()
        self.answers: list[httpx.Response] = []

    def pools(self) -> Pools:
        known = list(self.service._flights._sequences)
        return {
            "request_id": lambda: known,
            "scheduler": lambda: ["scheduler.0"],
            "prompt_tokens": lambda: [5],
            "completion_tokens": lambda: [1, 5],
        }

    async def populate(self) -> None:
        """Each time a capacity that is true, and some open requests."""
        await until(lambda: bool(self.service.urls))
        self.at[SCHEDULER].mesh.send(GATEWAY, "gateway.0", CREDIT)
        for number in range(OPEN_REQUESTS - len(self.posting)):
            stream = {"stream": True} if number % 2 else {"logprobs": 1, "echo": True}
            task = asyncio.create_task(self._post("attacked", **stream))
            self.posting.add(task)
            task.add_done_callback(self._answered)

    async def ask(self, at: dict[ServiceName, Station]) -> None:
        for task in list(self.posting):
            task.cancel()
        at[SCHEDULER].say(GATEWAY, CREDIT)
        asked = asyncio.create_task(self._post("wanted"))
        while True:
            request = await hear(at[TOKENIZER], Generate)
            if request.prompt.text == "wanted":
                break
        name, ends = request.request_id, Finished(request.request_id, FinishReason.LENGTH, 2)
        at[DETOKENIZER].say(GATEWAY, Accepted(name, 3, "scheduler.0"))
        columns = int32s([0, 6]), int32s([1, 2])
        at[DETOKENIZER].say(GATEWAY, Deltas([name] * 2, ["so it ", "goes on"], *columns, [ends]))
        answer = await asked
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == "so it goes on"
        assert answer.json()["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
        } | {
            name: value
            for name, value in answer.json()["usage"].items()
            if name.endswith("_details")
        }

    async def _post(self, prompt: str, **options: Any) -> httpx.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": 5, **options}
        async with httpx.AsyncClient(base_url=self.service.urls[0], timeout=60) as client:
            return await client.post("/v1/completions", json=body)

    def _answered(self, task: asyncio.Task[httpx.Response]) -> None:
        self.posting.discard(task)
        if not task.cancelled() and task.exception() is None:
            self.answers.append(task.result())


def test_a_gateway_goes_on(model_dir: Path) -> None:
    with GatewayUnderAttack(model_dir) as subject:
        subject.goes_on()
        assert all(answer.json() for answer in subject.answers if "json" in _kind(answer))


def _kind(answer: httpx.Response) -> str:
    return str(answer.headers.get("content-type", ""))

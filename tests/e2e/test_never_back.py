"""A process that does not come back: whoever waits for it is told so, and nothing is kept."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from services.detokenizer.service import DetokenizerService
from services.gateway import launches
from services.gateway.service import GatewayService
from services.model_executor.service import ModelExecutorService
from services.scheduler import service as scheduler_service
from services.scheduler.service import SchedulerService
from services.tokenizer.service import TokenizerService
from tests.conftest import until

if TYPE_CHECKING:
    from tests.conftest import Stations

STREAMS = 4
GRACE = 1.0  # seconds
SIMULATED: dict[str, Any] = {"device": "simulated", "sim": "base=0.01"}


async def read_stream(client: httpx.AsyncClient, begun: asyncio.Semaphore) -> list[dict[str, Any]]:
    """All events of a stream that must end by itself."""
    body = {"prompt": "A stream", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    events = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                begun.release()
    return events


async def test_an_executor_that_never_comes_back(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R043: streams and requests end with an error that says what is missing, as does health."""
    monkeypatch.setattr(scheduler_service, "GRACE_SECONDS", GRACE)
    monkeypatch.setattr(launches, "WAIT_SECONDS", GRACE)
    gateway = await stations.serve(GatewayService, port=0)
    services = [
        gateway,
        await stations.serve(TokenizerService),
        await stations.serve(SchedulerService),
        await stations.serve(DetokenizerService),
    ]
    executor = stations.service(ModelExecutorService, **SIMULATED)
    living = asyncio.create_task(executor.run())
    await stations.linked(*services, executor)
    await until(lambda: bool(gateway.urls))
    async with httpx.AsyncClient(base_url=gateway.urls[0], timeout=60) as client:
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        begun = asyncio.Semaphore(0)
        reading = [asyncio.create_task(read_stream(client, begun)) for _ in range(STREAMS)]
        for _ in range(10 * STREAMS):
            await begun.acquire()
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        while (health := await client.get("/health")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert health.json()["missing"] == ["model-executor"]
        late = await client.post("/v1/completions", json={"prompt": "Late", "max_tokens": 1})
        assert late.status_code == 503
        for events in await asyncio.gather(*reading):
            assert events[-1]["error"]["code"] == "service_unavailable", events[-1]
            assert not any("error" in event for event in events[:-1])
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["in_flight"] == 0

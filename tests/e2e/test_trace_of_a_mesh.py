"""The trace of a whole mesh in this process: what each iteration leaves behind, and its picture."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import httpx
import pytest

from services.detokenizer.service import DetokenizerService
from services.gateway.service import GatewayService
from services.launcher.cli import run
from services.model_executor.service import ModelExecutorService
from services.scheduler.service import SchedulerService
from services.tokenizer.service import TokenizerService
from tests.conftest import until
from tests.trace_format import Shown, shown

if TYPE_CHECKING:
    from tests.conftest import Stations

KEY = "secret"
STREAMS, TOKENS = 3, 30
SVG = "{http://www.w3.org/2000/svg}"
PICTURE = Path(__file__).parents[2] / "scripts" / "trace_picture"


@pytest.fixture
async def trace_file(stations: Stations, tmp_path: Path) -> AsyncIterator[Path]:
    """What `headrace trace` wrote after a few answers."""
    gateway = await stations.serve(GatewayService, port=0, api_key=[KEY])
    services = [
        gateway,
        await stations.serve(TokenizerService),
        await stations.serve(SchedulerService),
        await stations.serve(DetokenizerService),
        await stations.serve(ModelExecutorService, device="simulated", sim="base=0.004"),
    ]
    await stations.linked(*services)
    await until(lambda: bool(gateway.urls))
    url, headers = gateway.urls[0], {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        body = {"prompt": "A stream", "max_tokens": TOKENS, "n": STREAMS}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    path = tmp_path / "trace.json"
    words = ["trace", "--url", url, "--api-key", KEY, "--seconds", "60", "-o", str(path)]
    assert await asyncio.to_thread(run, words) == 0
    yield path


def steps(events: list[Shown], process: str, name: str) -> dict[int, Shown]:
    """The first event of each step."""
    found: dict[int, Shown] = {}
    for event in events:
        if (event.process, event.name) == (process, name):
            found.setdefault(event.args["step"], event)
    return found


def test_every_iteration_leaves_its_life_in_the_trace(trace_file: Path) -> None:
    events = shown(json.loads(trace_file.read_text()))
    planned = steps(events, "scheduler 0", "plan")
    received = steps(events, "model-executor 0", "Plan")
    started = steps(events, "model-executor 0", "iteration")
    sent = steps(events, "model-executor 0", "send results")
    detokenized = steps(events, "detokenizer 0", "StepResult")
    assert detokenized.keys() <= sent.keys() == started.keys() <= received.keys() == planned.keys()
    for step, iteration in started.items():
        assert planned[step].began <= received[step].began <= iteration.began
        assert iteration.ended <= sent[step].began
        assert step not in detokenized or sent[step].began <= detokenized[step].began
    written = [e.began for e in events if (e.process, e.name) == ("gateway 0", "Deltas")]
    assert max(written) >= detokenized[max(detokenized)].began


def test_all_work_is_in_the_trace_and_in_its_picture(trace_file: Path) -> None:
    events = shown(json.loads(trace_file.read_text()))
    iterations = [event for event in events if event.name == "iteration"]
    assert {event.thread for event in iterations} == {"compute"}  # they do not overlap
    assert sum(event.args["decode_rows"] for event in iterations) >= STREAMS * (TOKENS - 1)
    assert sum(event.name == "admitted" for event in events) == 1 + STREAMS  # and the probe
    encodes = [event for event in events if event.name == "encode"]
    assert {event.process for event in encodes} == {"tokenizer 0"}
    assert sum(event.args["rows"] for event in encodes) == 1 + STREAMS

    picture = trace_file.with_suffix(".svg")
    subprocess.run([sys.executable, PICTURE, trace_file, "-o", picture], check=True)
    titles = [title.text or "" for title in ElementTree.parse(picture).iter(f"{SVG}title")]
    assert sum(title.startswith("iteration") for title in titles) == 10
    assert any(title.startswith("StepResult") for title in titles)


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"traceEvents": []}')
    command = [sys.executable, str(PICTURE), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"only 0 iterations are in {path}\n"

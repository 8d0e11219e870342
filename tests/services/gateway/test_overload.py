"""A full server: who is refused, how soon, and until when."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from services.gateway import refusals
from services.gateway.admission import ENDS, LONGEST_WAIT, Admission
from services.gateway.errors import ApiError
from services.gateway.refusals import AT_ONCE, Refusals
from shared.messages import Credit, Generate
from tests.services.gateway.scripted_mesh import ScriptedMesh, background

CAPACITY = 16


@pytest.mark.parametrize(
    ("running", "waiting", "seconds_each", "least", "most"),
    [
        (32, 0, 4.0, 1, 1),  # the next place comes free in a moment
        (32, 32, 4.0, 1, 3),  # half of all wait, so half of what one takes is left
        (32, 96, 40.0, 15, 45),
        (1, 1000, 100.0, 50, LONGEST_WAIT),
    ],
)
def test_when_to_come_again(
    running: int, waiting: int, seconds_each: float, least: int, most: int
) -> None:
    now = 0.0
    admission = Admission(clock=lambda: now)
    admission.credit("a", Credit(max_num_seqs=32, max_queue=99, running=running, waiting=waiting))
    in_flight = running + waiting
    for _ in range(2 * ENDS):
        now += seconds_each / in_flight  # so a place is held for that long
        admission.ended(1)
    found = {admission.retry_after(in_flight) for _ in range(300)}
    assert least <= min(found)
    assert max(found) <= most
    assert len(found) > 1 or least == most  # spread, so that not all come together


def test_when_to_come_again_if_nothing_has_ended_yet() -> None:
    admission = Admission()
    admission.credit("a", Credit(max_num_seqs=1, max_queue=1, running=1, waiting=1))
    assert admission.retry_after(2) == 1


async def test_a_crowd_is_refused_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at once, then some more after each pause; whoever leaves takes nobody's turn."""
    monkeypatch.setattr(refusals, "PAUSE_SECONDS", 0.02)
    desk = Refusals()
    order: list[int] = []

    async def come(number: int) -> None:
        await desk.turn()
        order.append(number)

    with capture_logs() as lines:
        tasks = [asyncio.create_task(come(number)) for number in range(4 * AT_ONCE)]
        await asyncio.sleep(0)
        assert order == list(range(AT_ONCE))
        for task in tasks[AT_ONCE : 2 * AT_ONCE]:
            task.cancel()
        seen = {len(order)}
        while len(order) < 3 * AT_ONCE:
            await asyncio.sleep(0)
            seen.add(len(order))
        await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [*range(AT_ONCE), *range(2 * AT_ONCE, 4 * AT_ONCE)]
    assert seen == {AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE}
    assert [line["event"] for line in lines] == ["the server is full, requests are refused"]
    await asyncio.sleep(0.1)
    assert not desk._pausing  # a desk that nobody comes to does not turn


@pytest.fixture
async def full(mesh: ScriptedMesh, client: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that has room for nobody."""
    body = {"prompt": ["x"] * CAPACITY, "max_tokens": 1}
    async with background(client.post("/v1/completions", json=body)) as answering:
        requests = [await mesh.tokenizer.hear(Generate) for _ in range(CAPACITY)]
        yield client
        for request in requests:
            mesh.answer(request)
        assert (await answering).status_code == 200


async def post(client: httpx.AsyncClient, content: Any) -> int:
    headers = {"content-type": "application/json"}
    return (await client.post("/v1/completions", content=content, headers=headers)).status_code


async def test_refused_before_the_body_is_looked_at(full: httpx.AsyncClient) -> None:
    """But for a body that is too large, or one whose size is not known."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{no json"

    with capture_logs() as lines:
        assert [await post(full, b"{no json") for _ in range(50)] == [429] * 50
    assert [line["event"] for line in lines] == ["the server is full, requests are refused"]
    assert await post(full, pieces()) == 400
    assert await post(full, b"x" * (5 << 20)) == 413


async def test_refusals_leave_no_garbage(full: httpx.AsyncClient) -> None:
    """Looking for it would hold up whoever is served, for longer than all else here."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert {await post(full, b"{}") for _ in range(50)} == {429}
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, ApiError)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

"""Places for requests."""

from __future__ import annotations

import asyncio

from services.batch.throttle import SUCCESSES_PER_PLACE, Throttle


async def test_no_more_than_there_are_places() -> None:
    throttle = Throttle(2)
    await throttle.enter()
    await throttle.enter()
    third = asyncio.ensure_future(throttle.enter())
    await asyncio.sleep(0)
    assert not third.done()
    throttle.leave()
    await third


async def test_as_many_are_left_as_the_server_holds() -> None:
    throttle = Throttle(10)
    for _ in range(10):
        await throttle.enter()
    for _ in range(7):
        throttle.leave(full=True)
    assert throttle.places == 3
    waiting = asyncio.ensure_future(throttle.enter())
    await asyncio.sleep(0)
    assert not waiting.done()  # the places of those refused are gone
    throttle.leave()
    await waiting


async def test_one_place_is_always_left_and_places_come_back() -> None:
    throttle = Throttle(3)
    for _ in range(5):
        await throttle.enter()
        throttle.leave(full=True)
    assert throttle.places == 1
    for _ in range(10 * SUCCESSES_PER_PLACE):
        await throttle.enter()
        throttle.leave()
    assert throttle.places == 3
    for _ in range(3):
        await throttle.enter()
    fourth = asyncio.ensure_future(throttle.enter())
    await asyncio.sleep(0)
    assert not fourth.done()
    fourth.cancel()

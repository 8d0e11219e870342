"""Between mesh and client: no character is lost, repeated or moved, however both sides behave."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.collector import Collector
from services.gateway.errors import ApiError
from shared.messages import Failure, Finished
from shared.types import FinishReason, RequestId
from tests.services.gateway.details import Spoken, details


def finished(reason: FinishReason = FinishReason.STOP, tokens: int = 5) -> Finished:
    return Finished(RequestId("x"), reason, tokens)


async def read_all(collector: Collector) -> list[str]:
    texts = [""] * len(collector.choices)
    while changes := await collector.changes():
        for change in changes:
            texts[change.index] += change.text
    return texts


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=30))
async def test_overlapping_and_repeated_pieces_give_the_text(
    pieces: list[tuple[int, int, bool]],
) -> None:
    """Pieces may begin before the end of what is known (sent again after a loss), never after."""
    text = "".join(chr(ord("a") + place % 26) for place in range(300))
    collector = Collector(1)
    reader = asyncio.create_task(read_all(collector))
    known = 0
    for back, length, pause in pieces:
        start = max(known - back, 0)
        collector.add(0, start, text[start : start + length], 1)
        known = max(known, start + length)
        if pause:
            await asyncio.sleep(0)
    collector.finish(0, finished())
    assert await reader == [text[:known]]


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.booleans()), max_size=40))
async def test_choices_do_not_mix(pieces: list[tuple[int, str, bool]]) -> None:
    collector = Collector(3)
    reader = asyncio.create_task(read_all(collector))
    texts = ["", "", ""]
    for index, piece, pause in pieces:
        collector.add(index, len(texts[index]), piece, 1)
        texts[index] += piece
        if pause:
            await asyncio.sleep(0)
    for index in range(3):
        collector.finish(index, finished())
    assert await reader == texts


async def test_a_client_that_lags_gets_one_longer_piece() -> None:
    collector = Collector(1)
    for number in range(100):
        collector.add(0, number, "x", number + 1)
    collector.finish(0, finished(tokens=100))
    changes = await collector.changes()
    assert [(change.text, change.finished is not None) for change in changes] == [("x" * 100, True)]
    assert await collector.changes() == []
    assert collector.choices[0].completion_tokens == 100


async def test_a_gap_is_a_fault() -> None:
    collector = Collector(1)
    collector.add(0, 0, "abc", 1)
    collector.add(0, 4, "e", 2)
    assert [change.text for change in await collector.changes()] == ["abc"]
    with pytest.raises(ApiError) as caught:
        await collector.changes()
    assert caught.value.failure.status == 500


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=20))
async def test_overlapping_and_repeated_tokens_come_once(
    pieces: list[tuple[int, int, bool]],
) -> None:
    """Tokens may be told from before the end of what is known, as text may."""
    collector = Collector(1)
    told: list[int] = []
    known = first = 3
    for back, count, taken in pieces:
        start = max(known - back, first)
        tokens = [Spoken(position, b"x") for position in range(start, start + count)]
        collector.tell(0, details(tokens, start))
        known = max(known, start + count)
        if taken and known > first + len(told):
            told += [token.id for change in await collector.changes() for token in change.tokens]
    collector.finish(0, finished())
    told += [token.id for change in await collector.changes() for token in change.tokens]
    assert told == list(range(first, known))


async def test_a_gap_between_tokens_is_a_fault() -> None:
    collector = Collector(1)
    collector.tell(0, details([Spoken(5, b"x")], 0))
    collector.tell(0, details([Spoken(5, b"x")], 2))
    assert len(await collector.changes()) == 1
    with pytest.raises(ApiError) as caught:
        await collector.changes()
    assert caught.value.failure.status == 500


async def test_tokens_lag_as_text_does() -> None:
    collector = Collector(1, max_lag=10)
    collector.tell(0, details([Spoken(5, b"x" * 6), Spoken(5, b"x" * 6)], 0))
    assert collector.too_slow


async def test_too_much_lag_ends_the_request() -> None:
    collector = Collector(2, max_lag=10)
    collector.add(0, 0, "x" * 6, 1)
    collector.add(1, 0, "x" * 4, 1)
    assert len(await collector.changes()) == 2
    collector.add(0, 6, "x" * 11, 2)
    assert collector.too_slow
    with pytest.raises(ApiError) as caught:
        await collector.changes()
    assert caught.value.failure.code == "client_too_slow"


async def test_without_a_stream_nothing_lags() -> None:
    collector = Collector(1, max_lag=None)
    collector.add(0, 0, "x" * 2_000_000, 1)
    collector.finish(0, finished())
    assert await read_all(collector) == ["x" * 2_000_000]


async def test_opened_waits_for_every_choice() -> None:
    collector = Collector(2)
    opening = asyncio.create_task(collector.opened())
    collector.accept(0, 7)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not opening.done()
    collector.accept(1, 7)
    await opening
    assert [choice.prompt_tokens for choice in collector.choices] == [7, 7]


async def test_the_first_failure_counts() -> None:
    collector = Collector(2)
    collector.accept(0, 7)
    collector.fail(Failure(400, "first"))
    collector.fail(Failure(500, "second"))
    collector.add(0, 0, "late", 1)
    collector.finish(0, finished())
    for waiting in (collector.opened(), collector.changes()):
        with pytest.raises(ApiError, match="first"):
            await waiting


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.NONE])
async def test_an_end_that_is_no_answer_is_a_failure(reason: FinishReason) -> None:
    collector = Collector(1)
    collector.accept(0, 1)
    collector.finish(0, finished(reason))
    with pytest.raises(ApiError) as caught:
        await collector.changes()
    assert caught.value.failure.status == 500

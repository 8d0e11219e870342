"""Results in the order of what was asked for, with a bounded number under way."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from services.batch.in_order import HELD, in_order

WINDOW = 4


class Work:
    """Futures that the test finishes."""

    def __init__(self) -> None:
        self.futures: dict[int, Future[int]] = {}
        self.taken = self.ended = 0

    def items(self, number: int) -> Iterator[int]:
        for item in range(number):
            self.taken += 1
            yield item

    def start(self, item: int) -> Future[int]:
        future = self.futures[item] = Future()
        if item % 2:
            future.set_running_or_notify_cancel()
        return future

    def end(self, future: Future[int]) -> None:
        self.ended += 1


def test_any_order_of_ends_gives_the_order_of_items() -> None:
    work, drawn = Work(), random.Random(1)
    results = in_order(work.items(200), work.start, WINDOW, work.end)
    with ThreadPoolExecutor(1) as pool:  # finishes what runs, in any order
        stop = threading.Event()

        def finish() -> None:
            while not stop.is_set():
                running = [i for i, f in list(work.futures.items()) if not f.done()]
                assert len(running) <= WINDOW
                if running:
                    item = drawn.choice(running)
                    work.futures[item].set_result(item * 10)

        finishing = pool.submit(finish)
        got = [(item, future.result()) for item, future in results]
        stop.set()
        finishing.result()
    assert got == [(item, item * 10) for item in range(200)]
    assert work.ended == 200


def test_no_item_is_taken_before_there_is_room() -> None:
    work = Work()
    results = in_order(work.items(100), work.start, WINDOW, work.end)
    assert work.taken == 0
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, results)
        while len(work.futures) < WINDOW:
            pass
        assert work.taken == WINDOW
        work.futures[0].set_result(0)
        assert first.result()[0] == 0
    assert work.taken == WINDOW + 1
    results.close()


def test_a_slow_first_one_does_not_stop_the_others_nor_let_them_pile_up() -> None:
    work = Work()
    results = in_order(work.items(100), work.start, WINDOW, work.end)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, results)
        for item in range(1, HELD * WINDOW):
            while item not in work.futures:
                pass
            work.futures[item].set_result(item)
        while work.ended < HELD * WINDOW - 1:
            pass
        assert work.taken == HELD * WINDOW
        work.futures[0].set_result(0)
        assert first.result()[0] == 0
    results.close()


def test_closing_cancels_what_runs() -> None:
    work = Work()
    results = in_order(work.items(100), work.start, WINDOW, work.end)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, results)
        while 0 not in work.futures:
            pass
        work.futures[0].set_result(0)
        first.result()
    results.close()
    assert work.futures[2].cancelled()  # 1 and 3 run already, and cannot be taken back


def test_what_the_items_raise_cancels_too() -> None:
    work = Work()

    def items() -> Iterator[int]:
        yield 0
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        next(in_order(items(), work.start, WINDOW, work.end))
    assert work.futures[0].cancelled()


def test_nothing() -> None:
    work = Work()
    assert list(in_order([], work.start, WINDOW, work.end)) == []

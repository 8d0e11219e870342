"""Many pieces of work at once, their results in the order of what was asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from services.batch.background import ATTENTION_SECONDS

HELD = 8  # windows full of results that wait for an earlier one

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    items: Iterable[Item],
    start: Callable[[Item], Future[Result]],
    window: int,
    ended: Callable[[Future[Result]], None],
) -> Generator[tuple[Item, Future[Result]], None, None]:
    """Each item with its future, which is done; at most `window` are not done at any time.

    Takes items only when there is room. `ended` hears of each future as soon as it is done. What
    still runs is cancelled when the iterator is closed, or an exception leaves it.
    """
    source = iter(items)
    exhausted = False
    pending: deque[tuple[Item, Future[Result]]] = deque()
    done: SimpleQueue[Future[Result]] = SimpleQueue()
    running = 0
    try:
        while True:
            while not exhausted and running < window and len(pending) < HELD * window:
                for item in source:
                    future = start(item)
                    pending.append((item, future))
                    running += 1
                    future.add_done_callback(done.put)
                    break
                else:
                    exhausted = True
            while pending and pending[0][1].done():
                yield pending.popleft()
            if not running and not pending:
                return
            ended(_next(done))
            running -= 1
    finally:
        for _, future in pending:
            future.cancel()


def _next(done: SimpleQueue[Future[Result]]) -> Future[Result]:
    while True:
        try:
            return done.get(timeout=ATTENTION_SECONDS)
        except Empty:
            pass  # time to notice an interrupt

"""An event loop in a thread of its own, for callers who may be in one themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

ATTENTION_SECONDS = 0.5  # an interrupt that did not come as a signal is noticed after this

T = TypeVar("T")


class BackgroundLoop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start it; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; it is cancelled if this is interrupted."""
        future = self.submit(work)
        try:
            while True:
                try:
                    return future.result(ATTENTION_SECONDS)
                except TimeoutError:
                    if future.done():
                        return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread; what still runs is cancelled first."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

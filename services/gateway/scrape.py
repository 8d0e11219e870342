"""The metrics of all live services, asked for over the mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.exposition import merge
from services.gateway.flight import Link, new_request_id
from services.gateway.metrics import GatewayMetrics
from shared.messages import MetricsReply, MetricsRequest
from shared.types import RequestId, ServiceName

REPLY_SECONDS = 1.0

Instance = tuple[ServiceName, str]


class _Scrape:
    def __init__(self, awaited: set[Instance]) -> None:
        self.awaited = awaited
        self.replies: dict[Instance, str] = {}
        self.complete = asyncio.Event()

    def settle(self, instance: Instance, exposition: str | None) -> None:
        """The instance answered, or is lost (None)."""
        if instance not in self.awaited:
            return
        self.awaited.discard(instance)
        if exposition is not None:
            self.replies[instance] = exposition
        if not self.awaited:
            self.complete.set()


class Scraper:
    """An instance that does not answer in time is counted, and its last answer stands in for it,
    so that no sum ever falls because somebody was busy."""

    def __init__(self, link: Link, own: Callable[[], str], metrics: GatewayMetrics) -> None:
        self._link = link
        self._own = own
        self._metrics = metrics
        self._open: dict[RequestId, _Scrape] = {}
        self._last: dict[Instance, str] = {}

    async def exposition(self) -> bytes:
        """All metrics of the mesh in Prometheus text format."""
        request_id = new_request_id()
        scrape = _Scrape(set())
        self._open[request_id] = scrape
        try:
            for service in ServiceName:
                for name in self._link.peers(service):
                    if self._link.send(service, name, MetricsRequest(request_id)):
                        scrape.awaited.add((service, name))
            if scrape.awaited:
                async with asyncio.timeout(REPLY_SECONDS):
                    await scrape.complete.wait()
        except TimeoutError:
            self._metrics.unanswered_scrapes.inc(len(scrape.awaited))
        finally:
            del self._open[request_id]
        self._last |= scrape.replies
        texts = [self._own(), *scrape.replies.values()]
        texts += [self._last[late] for late in scrape.awaited if late in self._last]
        return await asyncio.to_thread(merge, texts)  # parsing takes milliseconds

    def replied(self, message: MetricsReply, instance: Instance) -> None:
        scrape = self._open.get(message.request_id)
        if scrape is not None:
            scrape.settle(instance, message.exposition)

    def lost(self, instance: Instance) -> None:
        self._last.pop(instance, None)
        for scrape in self._open.values():
            scrape.settle(instance, None)

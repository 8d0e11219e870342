"""The metrics of all live services, asked for over the mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.exposition import merge
from services.gateway.gather import Gatherer, Instance
from services.gateway.metrics import GatewayMetrics
from shared.messages import MetricsReply, MetricsRequest


class Scraper:
    """An instance that does not answer in time is counted, and its last answer stands in for it,
    so that no sum ever falls because somebody was busy."""

    def __init__(self, gatherer: Gatherer, own: Callable[[], str], metrics: GatewayMetrics) -> None:
        self._gatherer = gatherer
        self._own = own
        self._metrics = metrics
        self._last: dict[Instance, str] = {}

    async def exposition(self) -> bytes:
        """All metrics of the mesh in Prometheus text format."""
        gathered = await self._gatherer.ask(MetricsRequest, MetricsReply)
        self._metrics.unanswered_scrapes.inc(len(gathered.silent))
        fresh = {one: answer.reply.exposition for one, answer in gathered.answers.items()}
        self._last |= fresh
        texts = [self._own(), *fresh.values()]
        texts += [self._last[late] for late in gathered.silent if late in self._last]
        return await asyncio.to_thread(merge, texts)  # parsing takes milliseconds

    def lost(self, instance: Instance) -> None:
        self._last.pop(instance, None)

"""What all live services did in the last seconds, as one trace."""

from __future__ import annotations

import asyncio
import time

from services.gateway.chrome_trace import render
from services.gateway.gather import Answer, Gatherer, Instance
from shared.messages import TraceReply, TraceRequest
from shared.trace import Event, Trace, nanoseconds, unpack


class Tracer:
    def __init__(self, gatherer: Gatherer, own: Instance, trace: Trace) -> None:
        self._gatherer = gatherer
        self._own = own
        self._trace = trace

    async def chrome_trace(self, seconds: float) -> bytes:
        """The last `seconds` as JSON in Chrome's Trace Event Format."""
        window, asked = nanoseconds(seconds), time.monotonic_ns()
        gathered = await self._gatherer.ask(
            lambda request_id: TraceRequest(request_id, window), TraceReply
        )
        own = self._trace.since(asked - window)

        def everyone() -> bytes:
            events = {one: _read(answer, asked) for one, answer in gathered.answers.items()}
            return render({self._own: own, **events}, sorted(gathered.silent))

        return await asyncio.to_thread(everyone)  # milliseconds for each thousand events


def _read(answer: Answer[TraceReply], asked: int) -> list[Event]:
    """The events by the clock of this host; raises ValueError for what is no trace."""
    reply = answer.reply
    events = unpack(reply.names, reply.events)
    if asked <= reply.now <= answer.arrived:
        return list(events)
    shift = answer.arrived - reply.now  # another host's clock; right but for the reply's way
    return [
        event._replace(began=event.began + shift, ended=event.ended + shift) for event in events
    ]

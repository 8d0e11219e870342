"""One question to every live instance of the mesh, and what they answer in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.gateway.flight import Link, new_request_id
from shared.codec import Identity
from shared.inspection import Answer as Reply
from shared.inspection import Question
from shared.messages import MetricsReply, StatusReply, TraceReply
from shared.types import Incarnation, RequestId, ServiceName

REPLY_SECONDS = 1.0

Instance = tuple[ServiceName, str]
Kind = TypeVar("Kind", MetricsReply, StatusReply, TraceReply)


@dataclass(frozen=True, slots=True)
class Answer(Generic[Kind]):
    reply: Kind
    incarnation: Incarnation  # of who sent it
    arrived: int  # monotonic, ns


@dataclass(frozen=True, slots=True)
class Gathered(Generic[Kind]):
    answers: dict[Instance, Answer[Kind]]
    silent: set[Instance]  # alive, but not in time


class _Round:
    """One question, and those who have not answered it yet."""

    def __init__(self) -> None:
        self.awaited: set[Instance] = set()
        self.answers: dict[Instance, tuple[Reply, Incarnation, int]] = {}
        self.complete = asyncio.Event()

    def answered(self, reply: Reply, sender: Identity) -> None:
        instance = (sender.service, sender.name)
        if instance in self.awaited:
            self.answers[instance] = reply, sender.incarnation, time.monotonic_ns()
            self.await_no_more(instance)

    def await_no_more(self, instance: Instance) -> None:
        self.awaited.discard(instance)
        if not self.awaited:
            self.complete.set()


class Gatherer:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._open: dict[RequestId, _Round] = {}

    async def ask(
        self, question: Callable[[RequestId], Question], kind: type[Kind]
    ) -> Gathered[Kind]:
        """Ask everyone; waits no longer than REPLY_SECONDS."""
        request_id = new_request_id()
        asked = self._open[request_id] = _Round()
        try:
            for service in ServiceName:
                for name in self._link.present(service):
                    if self._link.send(service, name, question(request_id)):
                        asked.awaited.add((service, name))
            if asked.awaited:
                async with asyncio.timeout(REPLY_SECONDS):
                    await asked.complete.wait()
        except TimeoutError:
            pass
        finally:
            del self._open[request_id]
        answers = {
            instance: Answer(reply, incarnation, arrived)
            for instance, (reply, incarnation, arrived) in asked.answers.items()
            if isinstance(reply, kind)
        }
        return Gathered(answers, asked.awaited)

    def replied(self, reply: Reply, sender: Identity) -> None:
        asked = self._open.get(reply.request_id)
        if asked is not None:
            asked.answered(reply, sender)

    def lost(self, instance: Instance) -> None:
        for asked in self._open.values():
            asked.await_no_more(instance)

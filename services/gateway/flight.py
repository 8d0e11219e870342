"""One HTTP request's sequences, and how far each has come on its way into the mesh."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence as Names
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from services.gateway.collector import Collector
from services.gateway.request import GenerationRequest
from shared.messages import Message, Prompt
from shared.sampling import SamplingParams
from shared.types import RequestId, ServiceName


def new_request_id() -> RequestId:
    return RequestId(uuid.uuid4().hex)


class Link(Protocol):
    """What of the mesh is needed here."""

    def send(self, service: ServiceName, name: str, message: Message) -> bool: ...

    def peers(self, service: ServiceName) -> Names[str]: ...

    def present(self, service: ServiceName) -> Names[str]: ...


class Stage(IntEnum):
    HELD = 0  # the first sample of its prompt goes first, alone: a bad prompt is refused once
    WAITING = 1  # for a service that is missing
    SENT = 2  # a tokenizer has it; ours to send again
    ACCEPTED = 3  # the mesh has it


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one prompt. Each launch into the mesh has an id of its own, so whatever is
    left of a former one is never taken for this one's."""

    flight: Flight
    index: int
    prompt: Prompt
    params: SamplingParams
    followers: list[Sequence] = field(default_factory=list)
    stage: Stage = Stage.HELD
    request_id: RequestId = field(default_factory=new_request_id)
    tokenizers_lost: int = 0  # which had it, since it was accepted last
    sent_at: float = 0.0  # loop time, seconds
    tokenizer: str = ""
    detokenizer: str = ""
    scheduler: str = ""  # known once accepted
    lost: set[ServiceName] = field(default_factory=set)  # of those two; others will go on with it
    patience: asyncio.TimerHandle | None = None  # with those others
    tokens: int = 0
    last_token_at: float = 0.0  # perf_counter, seconds

    def at(self, service: ServiceName) -> str | None:
        """The instance of this service that has it, as far as that is known."""
        names = {
            ServiceName.SCHEDULER: self.scheduler,
            ServiceName.DETOKENIZER: self.detokenizer,
        }
        return names.get(service)


@dataclass(slots=True, eq=False)
class Flight:
    """One HTTP request's sequences."""

    request: GenerationRequest
    collector: Collector
    arrived: float  # perf_counter, seconds
    measured: bool  # a probe is not
    sequences: list[Sequence] = field(default_factory=list)
    # perf_counter, seconds, of the first of its sequences to come so far
    accepted_at: float | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None

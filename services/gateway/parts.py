"""The parts of a gateway that its endpoints use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from starlette.types import Scope

from services.gateway.admission import Admission
from services.gateway.body import RequestBody
from services.gateway.errors import ApiError, model_not_found
from services.gateway.flight import Flight, Link
from services.gateway.flights import Flights
from services.gateway.keys import ApiKeys
from services.gateway.metrics import GatewayMetrics
from services.gateway.overview import Overview
from services.gateway.parsing.answers import Formats
from services.gateway.questions import Questions
from services.gateway.readiness import Readiness
from services.gateway.refusals import Refusals
from services.gateway.request import Context, GenerationRequest
from services.gateway.scrape import Scraper
from services.gateway.tracing import Tracer
from shared.model import ModelInfo
from shared.settings import Settings
from shared.types import ServiceName

if TYPE_CHECKING:
    from services.gateway.spans import RequestSpans


@dataclass(frozen=True, slots=True)
class Parts:
    settings: Settings
    keys: ApiKeys
    model: ModelInfo
    formats: Formats
    names: list[str]  # of the model in the API; the first is the default
    started: int  # Unix time, seconds
    link: Link
    admission: Admission
    refusals: Refusals
    flights: Flights
    questions: Questions
    readiness: Readiness
    scraper: Scraper
    tracer: Tracer
    overview: Overview
    metrics: GatewayMetrics
    spans: RequestSpans | None  # None: nobody collects them
    draw_seed: Callable[[], int]
    log: structlog.typing.FilteringBoundLogger

    def name_of(self, wanted: str | None) -> str:
        """The name to answer with; raises ApiError for an unknown one."""
        if wanted is None:
            return self.names[0]
        if wanted not in self.names:
            raise model_not_found(wanted, self.names)
        return wanted

    def context(self, body: RequestBody, scope: Scope) -> Context:
        """What a request's body is read against; raises ApiError for an unknown model."""
        return Context(
            model=self.name_of(scope["path_params"].get("model", body.model)),
            vocab_size=self.model.vocab_size,
            max_model_len=self.model.max_model_len,
            hidden_size=self.model.hidden_size,
            draw_seed=self.draw_seed,
            key=scope.get("headrace.key"),
            request_id=scope.get("headrace.request_id", ""),
            max_logprobs=self.settings.max_logprobs,
            trust_chat_template=self.settings.trust_request_chat_template,
            formats=self.formats,
        )

    def take_off(self, request: GenerationRequest, arrived: float) -> Flight:
        """Admit a request and send it into the mesh; raises ApiError."""
        if (problem := self.no_room(request.size)) is not None:
            raise problem
        return self.flights.start(request, arrived)

    def no_room(self, sequences: int) -> ApiError | None:
        """Why so many more cannot be taken, if they cannot."""
        schedulers = self.link.present(ServiceName.SCHEDULER)
        absent = self.readiness.absent
        return self.admission.problem(sequences, len(self.flights), schedulers, absent)

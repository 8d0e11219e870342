"""The gateway: HTTP on one side, the mesh on the other."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.gateway.admission import Admission
from services.gateway.app import build_app
from services.gateway.errors import unavailable_failure
from services.gateway.flights import Flights
from services.gateway.gather import Gatherer
from services.gateway.handles import raise_limit, room
from services.gateway.keys import ApiKeys, BadKeyFile
from services.gateway.metrics import GatewayMetrics
from services.gateway.overview import Overview
from services.gateway.parsing.answers import Formats
from services.gateway.parts import Parts
from services.gateway.probe import Prober
from services.gateway.questions import Questions
from services.gateway.readiness import Readiness
from services.gateway.refusals import Refusals
from services.gateway.routing import Outstanding
from services.gateway.scrape import Scraper
from services.gateway.server import HttpServer, listening_sockets, urls, uvicorn_logs
from services.gateway.tls import Certificate
from services.gateway.tracing import Tracer
from services.gateway.watched import watch
from shared.codec import Identity
from shared.inspection import Answer as InspectionAnswer
from shared.mesh import Mesh
from shared.messages import (
    Accepted,
    Admitted,
    Credit,
    Decoded,
    Deltas,
    Encoded,
    Gone,
    Message,
    Refused,
)
from shared.metrics import exposition
from shared.model import ModelInfo, read_model_info
from shared.service import Service, StartError
from shared.settings import Settings, model_path
from shared.types import ServiceName

if TYPE_CHECKING:
    from services.gateway.spans import RequestSpans

MEETING_SECONDS = 3.0  # then health and readiness are told anyway


class GatewayService(Service):
    service = ServiceName.GATEWAY
    talks_to = frozenset(ServiceName)  # all of them for their metrics and traces

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        super().__init__(settings, mesh)
        outstanding = Outstanding()
        self._metrics = GatewayMetrics(self.registry)
        self._admission = Admission()
        self._readiness = Readiness()
        self._flights = Flights(mesh.identity.name, mesh, outstanding, self._metrics)
        self._questions = Questions(mesh, outstanding)
        self._gatherer = Gatherer(mesh)
        self._scraper = Scraper(self._gatherer, lambda: exposition(self.registry), self._metrics)
        self._tracer = Tracer(self._gatherer, (self.service, mesh.identity.name), self.trace)
        self._overview = Overview(self._gatherer, mesh.identity, lambda: self.inspection.status)
        self._prober = Prober(self._readiness, self._flights, self._may_probe, self.spawn)
        self._met = asyncio.Event()  # the mesh was whole
        self._server: HttpServer | None = None
        self._spans: RequestSpans | None = None
        self.urls: list[str] = []  # where it listens, once it does
        self._exits = contextlib.ExitStack()

    async def start(self) -> None:
        try:
            sockets = listening_sockets(self.settings)
        except OSError as error:
            place = self.settings.uds or f"{self.settings.host}:{self.settings.port}"
            raise StartError(f"cannot listen on {place}: {error.strerror or error}") from error
        for one in sockets:
            self._exits.callback(one.close)
        if self.settings.uds is not None and self.settings.listen_fd is None:
            self._exits.callback(Path(self.settings.uds).unlink, missing_ok=True)
        try:
            path, length = model_path(self.settings), self.settings.max_model_len
            model = await asyncio.to_thread(read_model_info, path, length)
        except ValueError as error:
            raise StartError(str(error)) from error
        self._exits.enter_context(uvicorn_logs())
        self._spans = self._request_spans()
        tls = self._tls()
        self._server = HttpServer(build_app(self._parts(model)), sockets, self._room(), tls)
        if self.settings.listen_fd is not None:
            await self._meet_others()
        self._server.start()
        self.urls = urls(sockets, secure=tls is not None)
        self.log.info("listening", urls=self.urls)

    def handle(self, message: Message, sender: Identity) -> None:
        if isinstance(message, Deltas):
            self._flights.deltas(message, sender.name)
        elif isinstance(message, Accepted):
            self._flights.accepted(message, sender.name)
        elif isinstance(message, Admitted):
            self._flights.admitted(message)
        elif isinstance(message, Gone):
            self._flights.gone(message)
        elif isinstance(message, Refused):
            if not self._questions.refused(message):
                self._flights.refused(message)
        elif isinstance(message, Encoded | Decoded):
            self._questions.answered(message)
        elif isinstance(message, InspectionAnswer):
            self._gatherer.replied(message, sender)
        elif isinstance(message, Credit):
            self._admission.credit(sender.name, message)
            self._mesh_changed()

    def peer_joined(self, service: ServiceName, name: str) -> None:
        self._readiness.joined(service, name)
        self._mesh_changed()
        self._flights.joined(service, name)
        self._questions.joined(service)

    def peer_lost(self, service: ServiceName, name: str) -> None:
        self._readiness.lost(service, name)
        if service is ServiceName.SCHEDULER:
            self._admission.forget(name)
        elif service is ServiceName.TOKENIZER:
            self._questions.lost(name)
        self._mesh_changed()
        self._gatherer.lost((service, name))
        self._scraper.lost((service, name))
        self._flights.lost(service, name)

    @property
    def seconds_since_last_token(self) -> float | None:
        return self._flights.seconds_since_last_token

    @property
    def load(self) -> Mapping[str, float]:
        return self._flights.load

    @property
    def draining(self) -> bool:
        return self._admission.draining

    @property
    def busy(self) -> bool:
        return self._server is not None and self._server.busy

    def drain(self) -> None:
        """Where others keep the socket, what is new is theirs, and whoever came here is served."""
        shared = self.settings.listen_fd is not None
        self._admission.draining, self._admission.closed = True, not shared
        if self._server is not None and shared:
            self._server.leave()
        elif self._server is not None:
            self._server.close_idle()

    async def stop(self) -> None:
        self._flights.end_all(unavailable_failure("The server is shutting down."))
        if self._server is not None:
            await self._server.stop()
        if self._spans is not None:
            await self._spans.close()
        self._exits.close()

    def _room(self) -> int:
        """For connections."""
        wanted, limit = self.settings.max_connections, raise_limit()
        found = room(wanted, limit)
        if found < wanted:
            self.log.warning(
                "too few open files are allowed (ulimit -n)",
                allowed=limit,
                connections=found,
                wanted=wanted,
            )
        return found

    async def _meet_others(self) -> None:
        """At a shared socket clients do not know that we are new: let us be of use first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEETING_SECONDS):
                await self._met.wait()

    def _request_spans(self) -> RequestSpans | None:
        endpoint = self.settings.otlp_traces_endpoint
        if endpoint is None:
            return None
        try:
            from services.gateway.spans import RequestSpans
        except ImportError as error:
            reason = "needs OpenTelemetry: pip install 'headrace[otel]'"
            raise StartError(f"--otlp-traces-endpoint: {reason} ({error.name})") from error
        return RequestSpans(endpoint, self.mesh.identity.name)

    def _keys(self) -> ApiKeys:
        file = self.settings.api_key_file
        try:
            keys = ApiKeys(self.settings.api_key, file)
        except (OSError, BadKeyFile) as error:
            raise StartError(f"--api-key-file: {error}") from error
        if file is not None:
            self.spawn(watch(keys), name="keys")
        return keys

    def _tls(self) -> ssl.SSLContext | None:
        certfile, keyfile = self.settings.ssl_certfile, self.settings.ssl_keyfile
        if certfile is None or keyfile is None:
            return None
        try:
            certificate = Certificate(certfile, keyfile)
        except (OSError, ssl.SSLError) as error:
            raise StartError(f"--ssl-certfile: {error}") from error
        self.spawn(watch(certificate), name="certificate")
        return certificate.context

    def _mesh_changed(self) -> None:
        schedulers = self.mesh.present(ServiceName.SCHEDULER)
        self._admission.changed(schedulers, self._readiness.absent)
        self._prober.consider()
        if self._may_probe():
            self._met.set()

    def _may_probe(self) -> bool:
        schedulers = self.mesh.present(ServiceName.SCHEDULER)
        return self._readiness.whole and self._admission.capacity(schedulers) > 0

    def _parts(self, model: ModelInfo) -> Parts:
        parsers = self.settings.tool_call_parser, self.settings.reasoning_parser
        formats = Formats.of(model, *parsers)
        drawn = self.settings.seed
        seeds = random.Random(None if drawn is None else f"{drawn}/{self.settings.index}")
        return Parts(
            settings=self.settings,
            keys=self._keys(),
            model=model,
            formats=formats,
            names=self.settings.served_model_name or [model.path.name],
            started=int(time.time()),
            link=self.mesh,
            admission=self._admission,
            refusals=Refusals(),
            flights=self._flights,
            questions=self._questions,
            readiness=self._readiness,
            scraper=self._scraper,
            tracer=self._tracer,
            overview=self._overview,
            metrics=self._metrics,
            spans=self._spans,
            draw_seed=lambda: seeds.getrandbits(63),
            log=self.log,
        )

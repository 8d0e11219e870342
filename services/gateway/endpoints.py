"""The small endpoints: models, tokenizing, health, readiness, metrics, status, traces, version."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway.body import parse
from services.gateway.connection import read_json, unless_client_leaves
from services.gateway.dialects.inference_protocol import model_metadata, server_metadata
from services.gateway.dialects.messages import ConversationBody
from services.gateway.dialects.tokenize import DetokenizeBody, TokenizeBody
from services.gateway.errors import error_body, invalid, unavailable_failure
from services.gateway.parts import Parts
from services.gateway.prompts import read_ids
from services.gateway.routing import work_of
from shared.messages import Decode, Decoded, Encode, Encoded

DEFAULT_TRACE_SECONDS = 5
MAX_TRACE_SECONDS = 60


class Endpoints:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._version = version("headrace")

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._parts.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._parts.name_of(request.path_params["id"])))

    async def tokenize(self, request: Request) -> Response:
        raw = await read_json(request, self._parts.settings.max_body_size)
        body = parse(TokenizeBody, raw)
        answer = await self._encoded(body, request)
        return JSONResponse(
            {
                "count": len(answer.token_ids),
                "max_model_len": answer.max_model_len,
                "tokens": answer.token_ids.tolist(),
                "token_strs": None,
            }
        )

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's: how many tokens the same body's prompt has."""
        raw = await read_json(request, self._parts.settings.max_body_size)
        answer = await self._encoded(parse(ConversationBody, raw), request)
        return JSONResponse({"input_tokens": len(answer.token_ids)})

    async def detokenize(self, request: Request) -> Response:
        raw = await read_json(request, self._parts.settings.max_body_size)
        body = parse(DetokenizeBody, raw)
        self._parts.name_of(body.model)
        ids = read_ids(body.tokens, self._parts.model.vocab_size, "tokens")
        asking = self._parts.questions.ask(
            lambda request_id: Decode(request_id, ids), Decoded, 1 + len(ids)
        )
        answer = await unless_client_leaves(request.receive, asking)
        return JSONResponse({"prompt": answer.text})

    async def health(self, request: Request) -> Response:
        """200 while every service that was ever seen is still there; waits for nothing."""
        missing = self._parts.readiness.missing
        age = self._parts.flights.seconds_since_last_token
        content = {
            "status": "unhealthy" if missing else "ok",
            "missing": missing,
            "in_flight": len(self._parts.flights),
            "seconds_since_last_token": None if age is None else round(age, 3),
        }
        return _state(content, f"Lost: {', '.join(missing)}." if missing else None)

    async def ready(self, request: Request) -> Response:
        """200 once a token has come through every service, until one is lost or a drain begins."""
        readiness = self._parts.readiness
        absent = readiness.absent + [
            one for one in readiness.missing if one not in readiness.absent
        ]
        if self._parts.admission.draining:
            problem: str | None = "The server is shutting down."
        elif absent:
            problem = f"Waiting for: {', '.join(absent)}."
        elif not readiness.ready:
            problem = "Waiting for a first token to come through."
        else:
            problem = None
        return _state({"ready": problem is None, "absent": absent}, problem)

    async def metrics(self, request: Request) -> Response:
        scraping = self._parts.scraper.exposition()
        content = await unless_client_leaves(request.receive, scraping)
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    async def trace(self, request: Request) -> Response:
        seconds = _trace_seconds(request.query_params.get("seconds"))
        tracing = self._parts.tracer.chrome_trace(seconds)
        content = await unless_client_leaves(request.receive, tracing)
        return Response(content, media_type="application/json")

    async def status(self, request: Request) -> Response:
        """Every live instance, and what it says of itself."""
        parts = self._parts
        asking = parts.overview.instances()
        content = {
            "model": parts.names[0],
            "version": self._version,
            "mesh": parts.settings.mesh,
            "missing": parts.readiness.missing,
            "instances": await unless_client_leaves(request.receive, asking),
        }
        return JSONResponse(content)

    async def live(self, request: Request) -> Response:
        """Open Inference Protocol: the server answers."""
        return JSONResponse({"live": True})

    async def server_ready(self, request: Request) -> Response:
        """Open Inference Protocol."""
        ready = (await self.ready(request)).status_code == HTTPStatus.OK
        return JSONResponse({"ready": ready}, HTTPStatus.OK if ready else 503)

    async def server_metadata(self, request: Request) -> Response:
        return JSONResponse(server_metadata(self._version))

    async def model_metadata(self, request: Request) -> Response:
        name = self._parts.name_of(request.path_params["model"])
        return JSONResponse(model_metadata(name))

    async def model_ready(self, request: Request) -> Response:
        name = self._parts.name_of(request.path_params["model"])
        ready = (await self.ready(request)).status_code == HTTPStatus.OK
        return JSONResponse({"name": name, "ready": ready}, HTTPStatus.OK if ready else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def _encoded(self, body: TokenizeBody | ConversationBody, request: Request) -> Encoded:
        prompt = body.to_prompt(self._parts.context(body, request.scope))
        asking = self._parts.questions.ask(
            lambda request_id: Encode(request_id, prompt), Encoded, work_of(prompt)
        )
        return await unless_client_leaves(request.receive, asking)

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._parts.started,
            "owned_by": "headrace",
            "root": self._parts.names[0],
            "parent": None,
            "max_model_len": self._parts.model.max_model_len,
        }


def _trace_seconds(text: str | None) -> float:
    try:
        seconds = float(DEFAULT_TRACE_SECONDS if text is None else text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TRACE_SECONDS:
        message = f"seconds: must be a number above 0, up to {MAX_TRACE_SECONDS}."
        raise invalid(message, "seconds")
    return seconds


def _state(content: dict[str, Any], problem: str | None) -> Response:
    if problem is None:
        return JSONResponse(content)
    return JSONResponse(content | error_body(unavailable_failure(problem)), 503)

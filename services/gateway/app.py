"""The application: routes, what wraps them, and how exceptions are answered."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.gateway import errors
from services.gateway.body import RequestBody
from services.gateway.connection import BodyTooLarge, on_body_too_large, on_client_gone
from services.gateway.dialect import DialectBody
from services.gateway.dialects.chat import ChatBody
from services.gateway.dialects.completion import CompletionBody
from services.gateway.dialects.embedding import EmbeddingBody
from services.gateway.dialects.inference_protocol import (
    MODEL_VERSION,
    GenerateBody,
    GenerateStreamBody,
)
from services.gateway.dialects.messages import ConversationBody, MessagesBody
from services.gateway.dialects.responses import ResponsesBody
from services.gateway.dialects.tokenize import DetokenizeBody, TokenizeBody
from services.gateway.endpoints import Endpoints
from services.gateway.generation import GenerationEndpoint
from services.gateway.middleware import CommonHeaders, KeyCheck
from services.gateway.openapi import PAGE, document
from services.gateway.parts import Parts

# Where text is generated, and what is asked for there.
BODIES: dict[str, type[DialectBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
}


def build_app(parts: Parts) -> ASGIApp:
    small = Endpoints(parts)
    routes = [
        *_generating(parts),
        *_inference_protocol(parts, small),
        *_documents(parts),
        Route("/v1/models", small.models),
        Route("/v1/models/{id:path}", small.model),
        Route("/v1/messages/count_tokens", small.count_tokens, methods=["POST"]),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
        Route("/health", small.health),
        Route("/ready", small.ready),
        Route("/metrics", small.metrics),
        Route("/status", small.status),
        Route("/trace", small.trace),
        Route("/version", small.version),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            errors.ApiError: errors.on_api_error,
            HTTPException: errors.on_http_exception,
            Exception: errors.on_exception,
            BodyTooLarge: on_body_too_large,
            ClientDisconnect: on_client_gone,
            errors.ClientLeft: on_client_gone,
        },
    )
    app.router.redirect_slashes = False  # a wrong path is a 404, not a second request
    # Around the whole application, so that its answers to faults get the headers too.
    guarded: ASGIApp = KeyCheck(app, parts.keys) if parts.keys else app
    if parts.settings.allowed_origins:  # around the keys: a browser asks first, without one
        guarded = CORSMiddleware(
            guarded,
            allow_origins=parts.settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return CommonHeaders(guarded, closing=lambda: parts.admission.draining)


def _generating(parts: Parts) -> list[Route]:
    return [
        Route(path, GenerationEndpoint(parts, body), methods=["POST"], name=path)
        for path, body in BODIES.items()
    ]


def _inference_protocol(parts: Parts, small: Endpoints) -> list[Route]:
    """https://github.com/kserve/open-inference-protocol"""
    routes = [
        Route("/v2", small.server_metadata),
        Route("/v2/health/live", small.live),
        Route("/v2/health/ready", small.server_ready),
    ]
    generate = GenerationEndpoint(parts, GenerateBody)
    stream = GenerationEndpoint(parts, GenerateStreamBody)
    for model in (f"/v2/models/{{model:path}}/versions/{MODEL_VERSION}", "/v2/models/{model:path}"):
        routes += [
            Route(f"{model}/ready", small.model_ready),
            Route(f"{model}/generate", generate, methods=["POST"], name=f"{model}/generate"),
            Route(f"{model}/generate_stream", stream, methods=["POST"], name=f"{model}/stream"),
        ]
    versioned = Route(f"/v2/models/{{model:path}}/versions/{MODEL_VERSION}", small.model_metadata)
    return [*routes, versioned, Route("/v2/models/{model:path}", small.model_metadata)]


def _documents(parts: Parts) -> list[Route]:
    """What is posted where, for programs and for people."""
    posted: dict[str, type[RequestBody]] = {
        **BODIES,
        "/v1/messages/count_tokens": ConversationBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
        "/v2/models/{model}/generate": GenerateBody,
        "/v2/models/{model}/generate_stream": GenerateStreamBody,
    }
    whole = document(posted, version("headrace"), secured=bool(parts.keys))
    answers = {
        "/openapi.json": Response(json.dumps(whole), media_type="application/json"),
        "/docs": HTMLResponse(PAGE),
    }

    def answering(answer: Response) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return answer

        return endpoint

    return [Route(path, answering(answer)) for path, answer in answers.items()]

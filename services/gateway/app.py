"""The application: routes, what wraps them, and how exceptions are answered."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp

from services.gateway import errors
from services.gateway.connection import BodyTooLarge, on_body_too_large, on_client_gone
from services.gateway.dialects.chat import ChatBody
from services.gateway.dialects.completion import CompletionBody
from services.gateway.endpoints import Endpoints
from services.gateway.generation import GenerationEndpoint
from services.gateway.middleware import CommonHeaders, KeyCheck
from services.gateway.parts import Parts


def build_app(parts: Parts) -> ASGIApp:
    small = Endpoints(parts)
    completions = GenerationEndpoint(parts, CompletionBody)
    chat = GenerationEndpoint(parts, ChatBody)
    routes = [
        Route("/v1/completions", completions, methods=["POST"], name="completions"),
        Route("/v1/chat/completions", chat, methods=["POST"], name="chat"),
        Route("/v1/models", small.models),
        Route("/v1/models/{id:path}", small.model),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
        Route("/health", small.health),
        Route("/ready", small.ready),
        Route("/metrics", small.metrics),
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
    guarded: ASGIApp = KeyCheck(app, parts.settings.api_key) if parts.settings.api_key else app
    if parts.settings.allowed_origins:  # around the keys: a browser asks first, without one
        guarded = CORSMiddleware(
            guarded,
            allow_origins=parts.settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return CommonHeaders(guarded, closing=lambda: parts.admission.draining)

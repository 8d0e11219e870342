"""The OpenAPI document of the routes, made of the bodies' own models, and a page to read it."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema

from services.gateway.body import RequestBody

REFERENCE = "#/components/schemas/{model}"
STREAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
EVENTS_ONLY = "generate_stream"  # the end of paths that answer with events and nothing else
# What any route may answer with beside 200.
COMMON = (401, 404, 405, 408, 431)
POSTED = (400, 413, 415, 429, 500, 503, 504)
QUESTIONS = {
    "/v1/models": "The names of the served model",
    "/v1/models/{id}": "One of them",
    "/health": "200 while no service that was ever seen is missing",
    "/ready": "200 once a token has come through every service",
    "/metrics": "Prometheus metrics of the whole mesh",
    "/status": "Every instance of the mesh, and what it is at",
    "/trace": "What the mesh did in the last seconds, as a Chrome trace",
    "/version": "The version of the server",
    "/v2": "Open Inference Protocol: the server",
    "/v2/health/live": "Open Inference Protocol: whether it lives",
    "/v2/health/ready": "Open Inference Protocol: whether it is ready",
    "/v2/models/{model}": "Open Inference Protocol: the model",
    "/v2/models/{model}/ready": "Open Inference Protocol: whether it is ready",
}
UNAVAILABLE = ("/health", "/ready", "/v2/health/ready", "/v2/models/{model}/ready")
TEXT = ("/metrics",)

# Of one version, whose bytes the browser checks: keys are typed into this page.
VIEWER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.35.0"
STYLE_HASH = "sha384-WlYgdmXYOOBWL5apwjDEZwN+U3HmXSSu5R6V5aGxEcf7z+KuRNwBhoxKVN1i3D5I"
SCRIPT_HASH = "sha384-gjRm0bEPMeTmMh5jT2cHccIwCUZSTd8YC+j0d0sXw0MdGEfScduGpSyF3ZSSLkX9"
PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><title>Headrace</title>
<link rel="stylesheet" href="{VIEWER}/swagger-ui.css"
 integrity="{STYLE_HASH}" crossorigin="anonymous">
</head>
<body>
<div id="page"></div>
<script src="{VIEWER}/swagger-ui-bundle.js"
 integrity="{SCRIPT_HASH}" crossorigin="anonymous"></script>
<script>SwaggerUIBundle({{url: "openapi.json", dom_id: "#page"}})</script>
</body>
</html>
"""


def document(
    bodies: Mapping[str, type[RequestBody]], version: str, *, secured: bool
) -> dict[str, Any]:
    """OpenAPI 3.1. `bodies`: what is posted to each path; `secured`: a key is asked for."""
    kinds = list(dict.fromkeys(bodies.values()))
    references, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=REFERENCE
    )
    schemas = {**definitions.get("$defs", {}), "Error": _error_schema()}
    paths = {
        path: {"post": _posting(path, references[kind, "validation"], kind)}
        for path, kind in bodies.items()
    }
    for path, text in QUESTIONS.items():
        paths[path] = {"get": _asking(path, text)}
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if secured:
        whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    return whole


def _posting(path: str, reference: Any, body: type[RequestBody]) -> dict[str, Any]:
    kinds = ["text/event-stream"] if path.endswith(EVENTS_ONLY) else ["application/json"]
    if path in STREAMING:
        kinds.append("text/event-stream")
    content: dict[str, Any] = {kind: {} for kind in kinds}
    return {
        "summary": (body.__doc__ or path).strip().partition("\n")[0],
        "operationId": _name(path),
        "parameters": _parameters(path),
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": {"200": {"description": "OK", "content": content}, **_errors(*POSTED)},
    }


def _asking(path: str, text: str) -> dict[str, Any]:
    kind = "text/plain" if path in TEXT else "application/json"
    also = (503,) if path in UNAVAILABLE else (400, 500) if path == "/trace" else ()
    return {
        "summary": text,
        "operationId": _name(path),
        "parameters": _parameters(path),
        "responses": {"200": {"description": "OK", "content": {kind: {}}}, **_errors(*also)},
    }


def _parameters(path: str) -> list[dict[str, Any]]:
    text = {"type": "string"}
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in ("id", "model")
        if f"{{{name}}}" in path
    ]
    if path == "/trace":
        seconds = {"type": "number", "exclusiveMinimum": 0, "maximum": 60}
        found.append({"name": "seconds", "in": "query", "schema": seconds})
    return found


def _errors(*statuses: int) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(model="Error")}
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
        for status in sorted({*COMMON, *statuses})
    }


def _error_schema() -> dict[str, Any]:
    """OpenAI's object, or what other protocols have under the same name."""
    return {"type": "object", "required": ["error"], "properties": {"error": {}}}


def _name(path: str) -> str:
    return "_".join(part.strip("{}") for part in path.split("/") if part)

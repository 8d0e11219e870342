"""The OpenAPI document names all routes, and what it says is valid."""

from __future__ import annotations

from typing import Any

import httpx
from openapi_spec_validator import validate

from tests.services.gateway.scripted_mesh import ScriptedMesh

UNNAMED = {"/openapi.json", "/docs"}  # they are about the others
VERSIONED = "/versions/"  # the same routes again


async def test_the_document(client: httpx.AsyncClient) -> None:
    whole = (await client.get("/openapi.json")).json()
    validate(whole)
    page = await client.get("/docs")
    assert "openapi.json" in page.text
    assert page.headers["content-type"].startswith("text/html")


async def test_every_route_is_in_it(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    whole = (await client.get("/openapi.json")).json()
    assert mesh.gateways[0]._server is not None
    app: Any = mesh.gateways[0]._server._server.config.app
    while hasattr(app, "_app"):
        app = app._app
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app.routes
        for method in route.methods - {"HEAD"}
        if route.path not in UNNAMED and VERSIONED not in route.path
    }
    named = {(path, method) for path, one in whole["paths"].items() for method in one}
    assert named == routes

"""The edges of HTTP: bodies, headers, keys, paths; raw where a client library would be too kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import http_protocol
from services.gateway.middleware import OPEN_PATHS
from shared.messages import Abort, Decode, Decoded, Encode, Encoded, Failure, Generate, Refused
from shared.types import int32s
from tests.services.gateway.scripted_mesh import ScriptedMesh, background, wait_ready

POSTS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
GETS = ["/v1/models", "/metrics", "/status", "/trace", "/version"]
JSON = {"content-type": "application/json"}
MAX_BODY = 10_000


def assert_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(response.content) < 10_000
    return error


async def raw(client: httpx.AsyncClient, *pieces: bytes) -> bytes:
    """All that comes back until the server ends the connection."""
    port = client.base_url.port
    assert port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(-1), 20)
    finally:
        writer.close()


def error_in(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    error: dict[str, Any] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize("path", POSTS)
async def test_bodies_that_are_no_request(client: httpx.AsyncClient, path: str) -> None:
    for content in (
        b"",
        b"{",
        b'"x"',
        b"[]",
        b"5",
        b"null",
        b"true",
        b"{}",
        b"\xff",
        b"\xef\xbb\xbf{}",
    ):
        assert_error(await client.post(path, content=content, headers=JSON), 400)
    for headers in ({}, {"content-type": "text/plain"}, {**JSON, "content-encoding": "gzip"}):
        error = assert_error(await client.post(path, content=b"{}", headers=headers), 415)
        assert "application/json" in error["message"]
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert_error(await client.post(path, content=b"{}", headers=kind), 400)


async def test_routes_that_are_none(client: httpx.AsyncClient) -> None:
    for path in ("/", "/v1", "/v1/complete", "/v1/completions/", "//v1/models", "/V1/MODELS"):
        assert_error(await client.get(path), 404)
    for path in POSTS:
        response = await client.get(path)
        assert_error(response, 405)
        assert response.headers["allow"] == "POST"
    assert_error(await client.post("/v1/models", json={}), 405)


async def test_request_ids_come_back(client: httpx.AsyncClient) -> None:
    async def echo(value: bytes) -> str:
        headers = {b"x-request-id": value}
        return (await client.get("/version", headers=headers)).headers["x-request-id"]

    assert await echo(b"mine-1") == "mine-1"
    assert await echo(b"x" * 1000) == "x" * 128
    assert await echo("a\u00e9\t b".encode("latin-1")) == "ab"
    drawn = {await echo(value) for value in (b"", b"", b"\xff")}
    assert len(drawn) == 3
    assert "date" in (await client.get("/nowhere")).headers


async def test_headers_without_end(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.05)
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    for pieces in (
        [head + b"a: " + b"x" * 1_000_000 + b"\r\n\r\n"],
        [head, *[b"a: " + b"x" * 1000 + b"\r\n"] * 100],
        [b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n"],
    ):
        assert error_in(await raw(client, *pieces), 431)["message"]
    assert error_in(await raw(client, b"nonsense\r\n\r\n"), 400)["message"]
    assert (await client.get("/health")).status_code == 200


@pytest.fixture
async def small(mesh: ScriptedMesh, tiny_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that takes small bodies only, and wants a key."""
    keys = ["secret-1", "secret-2"]
    url = await mesh.start_gateway(tiny_model, max_body_size=MAX_BODY, api_key=keys)
    await mesh.start_all()
    headers = {"authorization": f"Bearer {keys[1]}"}
    async with httpx.AsyncClient(base_url=url, timeout=30, headers=headers) as client:
        await wait_ready(client)
        yield client


async def test_bodies_that_are_too_large(mesh: ScriptedMesh, small: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"x" * 100_000

    def prompt(size: int) -> bytes:
        return json.dumps({"prompt": "x" * (size - len('{"prompt": ""}'))}).encode()

    for path in POSTS:
        error = assert_error(
            await small.post(path, content=prompt(MAX_BODY + 1), headers=JSON), 413
        )
        assert str(MAX_BODY) in error["message"]
    for content in (b"x" * 50_000_000, endless()):
        assert_error(await small.post(POSTS[0], content=content, headers=JSON), 413)
    mesh.autopilot = True
    exact = await small.post(POSTS[0], content=prompt(MAX_BODY), headers=JSON)
    assert exact.status_code == 200


async def test_a_body_that_was_only_announced(small: httpx.AsyncClient) -> None:
    """The refusal comes before the body."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret-1\r\n"
        b"content-type: application/json\r\ncontent-length: 100000000\r\n\r\n"
    )
    assert error_in(await raw(small, head), 413)["code"] == "request_too_large"


async def test_keys(small: httpx.AsyncClient) -> None:
    """R101: no route but those of health does anything without a key."""
    bad = [
        *({}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer no"}),
        *({"authorization": "secret-1"}, {"authorization": "Basic secret-1"}),
        *({"x-api-key": "secret"}, {"authorization": "Bearer secret"}),
    ]
    document = (await small.get("/openapi.json")).json()["paths"]
    routes = [(method.upper(), path) for path, one in document.items() for method in one]
    assert len(routes) > len(POSTS) + len(GETS)
    paths = [(method, path) for method, path in routes if path not in OPEN_PATHS]
    paths += [("POST", f"/{path}") for path in POSTS] + [("POST", f"{path}/") for path in POSTS]
    paths += [("GET", path) for path in GETS]
    paths += [("GET", path) for path in ("//v1/models", "/nowhere", "/health/", "/HEALTH", "/docs")]
    paths += [("OPTIONS", "/v1/models"), ("GET", "/version?api_key=secret-1")]
    async with httpx.AsyncClient(base_url=small.base_url) as client:
        for method, path in paths:
            for headers in bad:
                answer = await client.request(method, path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                told = answer.json()["error"]
                assert "valid API key" in (told if isinstance(told, str) else told["message"])
                if not path.startswith(("/v1/messages", "/v2")):  # they have shapes of their own
                    assert assert_error(answer, 401)["code"] == "invalid_api_key"
        twice = [("authorization", "Bearer no"), ("authorization", "Bearer secret-1")]
        for both in (twice, twice[::-1]):
            assert_error(await client.get("/version", headers=both), 401)
        for path in OPEN_PATHS:
            assert (await client.get(path)).status_code == 200
        for value in ("Bearer secret-1", "bearer secret-2", "BEARER  secret-1"):
            response = await client.get("/version", headers={"authorization": value})
            assert response.status_code == 200
    assert b"401 " in await raw(
        small, b"GET /health/../v1/models HTTP/1.1\r\nconnection: close\r\n\r\n"
    )


async def test_a_key_is_a_tenant(mesh: ScriptedMesh, small: httpx.AsyncClient) -> None:
    tenants = []
    for key in ("secret-1", "secret-2"):
        headers = {"authorization": f"Bearer {key}"}
        posting = small.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
        async with background(posting):
            tenants.append((await mesh.tokenizer.hear(Generate)).tenant)
    assert tenants == ["key0", "key1"]


async def test_tokenize(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    async with background(client.post("/tokenize", json={"prompt": "hi"})) as answering:
        question = await mesh.tokenizer.hear(Encode)
        assert (question.prompt.text, question.prompt.add_special_tokens) == ("hi", True)
        mesh.tokenizer.tell(Encoded(question.request_id, int32s([5, 6]), 256))
        assert (await answering).json() == {
            "count": 2,
            "max_model_len": 256,
            "tokens": [5, 6],
            "token_strs": None,
        }
    messages = [{"role": "user", "content": "hi"}]
    async with background(client.post("/tokenize", json={"messages": messages})) as answering:
        question = await mesh.tokenizer.hear(Encode)
        assert question.prompt.chat is not None
        assert not question.prompt.add_special_tokens  # R109: the template writes its own
        failure = Failure(400, "no template", "messages")
        mesh.tokenizer.tell(Refused(question.request_id, failure))
        assert assert_error(await answering, 400)["message"] == "no template"


async def test_detokenize(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    async with background(client.post("/detokenize", json={"tokens": [5, 6]})) as answering:
        question = await mesh.tokenizer.hear(Decode)
        assert question.token_ids.tolist() == [5, 6]
        mesh.tokenizer.tell(Decoded(question.request_id, "hï"))
        assert (await answering).json() == {"prompt": "hï"}
    for tokens in ([-1], [1000], [10**30]):
        error = assert_error(await client.post("/detokenize", json={"tokens": tokens}), 400)
        assert error["param"] == "tokens"


async def test_a_client_that_leaves_a_question(
    mesh: ScriptedMesh, client: httpx.AsyncClient
) -> None:
    async with background(client.post("/tokenize", json={"prompt": "hi"})):
        question = await mesh.tokenizer.hear(Encode)
    assert (await mesh.tokenizer.hear(Abort)).request_id == question.request_id

"""Browsers, time limits, silent streams and certificates."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from services.gateway import generation, tls, watched
from shared.messages import Generate
from shared.types import FinishReason
from tests.services.gateway.scripted_mesh import (
    ScriptedMesh,
    background,
    events_of,
    until,
    wait_ready,
)

ORIGIN = "https://chat.example.org"
ASK = {"prompt": "hi", "max_tokens": 2}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def start(mesh: ScriptedMesh, model: Path, **settings: Any) -> httpx.AsyncClient:
    url = await mesh.start_gateway(model, **settings)
    await mesh.start_all()
    client = httpx.AsyncClient(base_url=url, timeout=30)
    mesh.exits.push_async_callback(client.aclose)
    await wait_ready(client)
    return client


async def test_pages_of_allowed_origins_may_ask(mesh: ScriptedMesh, tiny_model: Path) -> None:
    """R103: the preflight bears no key; refusals and streams bear the header too."""
    client = await start(mesh, tiny_model, allowed_origins=[ORIGIN], api_key=["k"])
    mesh.autopilot = True
    path, allowed = "/v1/completions", "access-control-allow-origin"
    preflight = await client.options(path, headers={"origin": ORIGIN, **PREFLIGHT})
    assert preflight.status_code == 200
    assert preflight.headers[allowed] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert allowed not in (await client.options(path, headers={"origin": "x", **PREFLIGHT})).headers
    key = {"authorization": "Bearer k"}
    for headers, body, status in (
        ({}, ASK, 401),
        (key, {}, 400),
        (key, ASK, 200),
        (key, ASK | {"stream": True}, 200),
    ):
        answer = await client.post(path, json=body, headers={"origin": ORIGIN, **headers})
        assert (answer.status_code, answer.headers[allowed]) == (status, ORIGIN)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        stranger = await client.post(path, json=body, headers={"origin": "http://x", **headers})
        assert allowed not in stranger.headers


async def test_without_origins_nothing_is_said_of_them(client: httpx.AsyncClient) -> None:
    answer = await client.get("/version", headers={"origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long(
    mesh: ScriptedMesh, tiny_model: Path, stream: bool
) -> None:
    """R025: a stream says so with its last event, and is not followed by a [DONE]."""
    client = await start(mesh, tiny_model, request_timeout=0.2)
    ask = client.post("/v1/completions", json=ASK | {"stream": stream})
    async with background(ask) as asking:
        mesh.accept(await mesh.tokenizer.hear(Generate))
        answer = await asking
    if stream:
        assert answer.status_code == 200
        (event,) = events_of(answer.text)
        assert event["error"]["code"] == "request_timeout"
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "request_timeout"
    await until(lambda: len(mesh.gateways[0]._flights) == 0)


async def test_a_stream_is_never_silent_for_long(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_SECONDS", 0.02)
    body = ASK | {"stream": True}
    ask = client.stream("POST", "/v1/completions", json=body)
    async with background(ask.__aenter__()) as asking:
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request)
        answer = await asking
    lines = answer.aiter_lines()
    assert [await anext(lines), await anext(lines)] == [": keep-alive", ""]
    mesh.delta(request, "a")
    mesh.delta(request, "b", FinishReason.STOP)
    rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert "".join(line for line in rest if '"text":"' in line).count('"finish_reason":"stop"') == 1


def write_pair(authority: trustme.CA, folder: Path, name: str) -> trustme.LeafCert:
    pair = authority.issue_cert("127.0.0.1", "localhost", common_name=name)
    pair.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(one.bytes() for one in pair.cert_chain_pems))
    return pair


async def serial(port: int, context: ssl.SSLContext) -> str:
    """Of the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: dict[str, Any] = writer.get_extra_info("peercert")
    writer.close()
    return str(shown["serialNumber"])


async def test_certificates_are_taken_over_when_they_change(
    mesh: ScriptedMesh, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R118: the new one for new connections, and the old one as long as the new is broken."""
    monkeypatch.setattr(watched, "LOOK_SECONDS", 0.02)
    authority = trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)
    write_pair(authority, tmp_path, "first")
    files: dict[str, Any] = {
        name: str(tmp_path / f"{name[4:-4]}.pem") for name in ("ssl_certfile", "ssl_keyfile")
    }
    url = await mesh.start_gateway(tiny_model, **files)
    assert url.startswith("https://127.0.0.1:")
    async with httpx.AsyncClient(base_url=url, verify=context) as client:
        assert (await client.get("/health")).status_code == 200
    port = int(url.rpartition(":")[2])
    first = await serial(port, context)
    looked = tls.Certificate.refresh
    looks = 0

    def refresh(certificate: tls.Certificate) -> None:
        nonlocal looks
        looked(certificate)
        looks += 1

    monkeypatch.setattr(tls.Certificate, "refresh", refresh)
    (tmp_path / "key.pem").write_text("broken")
    await until(lambda: looks >= 2)
    assert await serial(port, context) == first
    write_pair(authority, tmp_path, "second")
    async with asyncio.timeout(20):
        while await serial(port, context) == first:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

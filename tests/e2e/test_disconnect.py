"""Clients that leave: whenever they do, what was theirs is free again at once."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import pytest

from tests.e2e.harness import MODEL, RunningMesh

ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Write a long tale",
    "max_tokens": 4000,
    "ignore_eos": True,
}


def wait_running(mesh: RunningMesh, count: int) -> None:
    deadline = time.monotonic() + 20
    while mesh.metric("headrace_num_requests_running") != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("streaming", [True, False])
def test_leaving_while_decoding(mesh: RunningMesh, streaming: bool) -> None:
    """R040"""
    body = httpx.Request("POST", mesh.url, json={**ENDLESS, "stream": streaming}).read()
    with socket.create_connection((httpx.URL(mesh.url).host, httpx.URL(mesh.url).port)) as client:
        client.sendall(_head(body) + body)
        wait_running(mesh, 1)
    before = mesh.metric("headrace_generation_tokens_total")
    mesh.wait_idle()
    assert mesh.metric("headrace_generation_tokens_total") - before < 60


def _head(body: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )


def test_leaving_at_any_moment(mesh: RunningMesh) -> None:
    """R041: queued, in prefill, at the first chunk, decoding."""
    prompts = ["short", [5] * 3000]
    for number in range(30):
        body = {**ENDLESS, "prompt": prompts[number % 2], "stream": number % 3 > 0}
        content = httpx.Request("POST", mesh.url, json=body).read()
        address = (httpx.URL(mesh.url).host, httpx.URL(mesh.url).port)
        with socket.create_connection(address) as client:
            client.sendall(_head(content) + content)
            time.sleep(number % 10 * 0.03)
    mesh.wait_idle()
    assert mesh.text("One, two,", max_tokens=4)


def test_all_leave_at_once(mesh: RunningMesh) -> None:
    """R098: the gauges fall without new traffic."""
    body = httpx.Request("POST", mesh.url, json={**ENDLESS, "stream": True}).read()
    address = (httpx.URL(mesh.url).host, httpx.URL(mesh.url).port)
    clients = [socket.create_connection(address) for _ in range(20)]
    for client in clients:
        client.sendall(_head(body) + body)
    wait_running(mesh, 20)
    for client in clients:
        client.close()
    mesh.wait_idle()


def test_the_same_request_again(mesh: RunningMesh) -> None:
    """R059: stopped after the first chunk and sent again, the text is the same."""
    body = {"model": MODEL, "prompt": "The sea is", "max_tokens": 6, "temperature": 0}
    expected = mesh.text("The sea is", max_tokens=6)
    for _ in range(10):
        with mesh.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        assert mesh.text("The sea is", max_tokens=6) == expected

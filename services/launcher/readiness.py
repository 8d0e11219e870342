"""Waiting for the mesh to answer, with a sign of life for whoever watches."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from shared.unix_socket import PREFIX

ASK_SECONDS = 0.1
ANSWER_SECONDS = 5.0
TELL_SECONDS = 5.0


async def wait_ready(url: str, progress: Callable[[str], None]) -> None:
    """Return once /ready at `url` answers 200; says what is missing every few seconds."""
    loop = asyncio.get_running_loop()
    began = told = loop.time()
    while True:
        ready, missing = await asyncio.to_thread(_ask, url)
        if ready:
            return
        if loop.time() - told > TELL_SECONDS:
            told = loop.time()
            progress(f"starting, {told - began:.0f} s: {missing}")
        await asyncio.sleep(ASK_SECONDS)


def _ask(url: str) -> tuple[bool, str]:
    connection = _connection(url)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return response.status == 200, _reason(response.read())
    except (OSError, HTTPException):
        return False, "the gateway does not answer yet"
    finally:
        connection.close()


def _connection(url: str) -> HTTPConnection:
    if url.startswith(PREFIX):
        return _UnixConnection(url.removeprefix(PREFIX))
    if url.startswith("https:"):  # our own socket: whose certificate it is does not matter
        context = ssl._create_unverified_context()
        return HTTPSConnection(urlsplit(url).netloc, timeout=ANSWER_SECONDS, context=context)
    return HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_SECONDS)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "not ready"

"""Waiting for the mesh to answer, with a sign of life for whoever watches."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable

ASK_SECONDS = 0.1
TELL_SECONDS = 5.0


async def wait_ready(url: str, progress: Callable[[str], None]) -> None:
    """Return once `url`/ready answers 200; says what is missing every few seconds."""
    loop = asyncio.get_running_loop()
    began = told = loop.time()
    while True:
        ready, missing = await asyncio.to_thread(_ask, f"{url}/ready")
        if ready:
            return
        if loop.time() - told > TELL_SECONDS:
            told = loop.time()
            progress(f"starting, {told - began:.0f} s: {missing}")
        await asyncio.sleep(ASK_SECONDS)


def _ask(url: str) -> tuple[bool, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200, ""
    except urllib.error.HTTPError as error:
        with error:
            return False, _reason(error.read())
    except OSError:
        return False, "the gateway does not answer yet"


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "not ready"

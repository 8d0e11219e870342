"""`headrace trace`: fetch the trace of a running mesh, for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlencode

from shared.service import EXIT_BAD_SETTING, EXIT_FAULT

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_FILE = "headrace-trace.json"
STANDARD_OUTPUT = "-"
ANSWER_SECONDS = 60


class _BadFlag(Exception):
    pass


class _Failed(Exception):
    """No trace; the text is one clear line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _BadFlag(message)


def trace(words: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        given = _parser().parse_args(list(words))
        content = _fetch(given.url.rstrip("/").removesuffix("/v1"), given.api_key, given.seconds)
        events = _count(content)
        _write(given.output, content)
    except _BadFlag as error:
        return _fail(str(error), EXIT_BAD_SETTING)
    except _Failed as error:
        return _fail(str(error), EXIT_FAULT)
    if given.output != STANDARD_OUTPUT:
        print(f"{given.output}: {events} events; https://ui.perfetto.dev shows them")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="headrace trace", description="Save what a running mesh just did.")
    parser.add_argument("--url", default=DEFAULT_URL, help="of the gateway (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("HEADRACE_API_KEY", "").split(",")[0],
        help="one of the server's keys (default: from HEADRACE_API_KEY)",
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="how much of the past (default: %(default)g)"
    )
    parser.add_argument(
        "-o", "--output", default=DEFAULT_FILE, help="file, - for standard output (%(default)s)"
    )
    return parser


def _fetch(url: str, key: str, seconds: float) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise _BadFlag(f"--url: {url!r} is no http address")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(
            f"{url}/trace?{urlencode({'seconds': seconds})}", headers=headers
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            reason = f"{error.code}, {_message(error.read(10_000)) or error.reason}"
        raise _Failed(f"{url} answered {reason}") from None
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or str(error.reason)
        raise _Failed(f"{url} does not answer: {reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise _Failed(f"{url} cannot be asked: {error or type(error).__name__}") from None


def _message(body: bytes) -> str | None:
    """What OpenAI's error shape says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _count(content: bytes) -> int:
    try:
        return sum(event["ph"] != "M" for event in json.loads(content)["traceEvents"])
    except (ValueError, KeyError, TypeError):
        raise _Failed("what came back is no trace") from None


def _write(output: str, content: bytes) -> None:
    try:
        if output == STANDARD_OUTPUT:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        else:
            Path(output).write_bytes(content)
    except OSError as error:
        raise _Failed(f"cannot write {output}: {error.strerror}") from None


def _fail(reason: str, code: int) -> int:
    print(f"headrace trace: {reason}", file=sys.stderr)
    return code

"""Asking a running gateway something over HTTP; what goes wrong is one clear line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import NoReturn

from shared.types import EXIT_BAD_SETTING, EXIT_FAULT

DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_SECONDS = 60


class BadFlag(Exception):
    """The text is one clear line."""


class Failed(Exception):
    """No answer, or none that is any good; the text is one clear line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadFlag(message)

    def add_key(self) -> None:
        self.add_argument(
            "--api-key",
            default=os.environ.get("HEADRACE_API_KEY", "").split(",")[0],
            help="one of the server's keys (default: from HEADRACE_API_KEY)",
        )


def run_command(name: str, command: Callable[[Sequence[str]], None], words: Sequence[str]) -> int:
    """Returns the exit code; says why it is not 0."""
    try:
        command(words)
    except BadFlag as error:
        code = EXIT_BAD_SETTING
        reason = str(error)
    except Failed as error:
        code = EXIT_FAULT
        reason = str(error)
    else:
        return 0
    print(f"headrace {name}: {reason}", file=sys.stderr)
    return code


def fetch(url: str, path: str, key: str) -> bytes:
    """What the gateway at `url` answers; `url` may end as clients of the API write it."""
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise BadFlag(f"{url!r} is no http address")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            reason = f"{error.code}, {_message(error.read(10_000)) or error.reason}"
        raise Failed(f"{url} answered {reason}") from None
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or str(error.reason)
        raise Failed(f"{url} does not answer: {reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise Failed(f"{url} cannot be asked: {error or type(error).__name__}") from None


def _message(body: bytes) -> str | None:
    """What OpenAI's error shape says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None

"""`headrace trace`: fetch the trace of a running mesh, for ui.perfetto.dev."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from services.launcher.asking import DEFAULT_URL, Failed, Parser, fetch, run_command

DEFAULT_FILE = "headrace-trace.json"
STANDARD_OUTPUT = "-"


def trace(words: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    return run_command("trace", _trace, words)


def _trace(words: Sequence[str]) -> None:
    given = _parser().parse_args(list(words))
    content = fetch(given.url, f"/trace?{urlencode({'seconds': given.seconds})}", given.api_key)
    events = _count(content)
    _write(given.output, content)
    if given.output != STANDARD_OUTPUT:
        print(f"{given.output}: {events} events; https://ui.perfetto.dev shows them")


def _parser() -> Parser:
    parser = Parser(prog="headrace trace", description="Save what a running mesh just did.")
    parser.add_argument("--url", default=DEFAULT_URL, help="of the gateway (default: %(default)s)")
    parser.add_key()
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="how much of the past (default: %(default)g)"
    )
    parser.add_argument(
        "-o", "--output", default=DEFAULT_FILE, help="file, - for standard output (%(default)s)"
    )
    return parser


def _count(content: bytes) -> int:
    try:
        return sum(event["ph"] != "M" for event in json.loads(content)["traceEvents"])
    except (ValueError, KeyError, TypeError):
        raise Failed("what came back is no trace") from None


def _write(output: str, content: bytes) -> None:
    try:
        if output == STANDARD_OUTPUT:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        else:
            Path(output).write_bytes(content)
    except OSError as error:
        raise Failed(f"cannot write {output}: {error.strerror}") from None

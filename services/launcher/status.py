"""`headrace status`: who is in a running mesh, and what each is at."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from services.launcher.asking import DEFAULT_URL, Failed, Parser, fetch, run_command

STYLES = {"ready": "green", "loading": "yellow", "leaving": "yellow", "silent": "red"}
WATCH_SECONDS = 2.0
RATED = ("tokens", "iterations")  # totals of which their growth is worth showing, too
COLUMNS = ("running", "waiting")  # of all loads, with columns of their own
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
PIPE_WIDTH = 200  # where nobody says how wide it is


def status(words: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    return run_command("status", _status, words)


def _status(words: Sequence[str]) -> None:
    given = _parser().parse_args(list(words))
    if given.json:
        sys.stdout.write(fetch(given.url, "/status", given.api_key).decode() + "\n")
    elif given.watch is None:
        _console().print(_shown(_read(given.url, given.api_key), {}, 1.0))
    else:
        _watch(given.url, given.api_key, given.watch)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _parser() -> Parser:
    parser = Parser(prog="headrace status", description="Show who is in a running mesh.")
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="of a gateway (%(default)s)")
    parser.add_key()
    parser.add_argument("--json", action="store_true", help="as JSON, as GET /status has it")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help="ask again and again, every %(const)g seconds, and show rates",
    )
    return parser


def _read(url: str, key: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(fetch(url, "/status", key))
        _shown(content, {}, 1.0)  # it is a status if it can be shown as one
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Failed("what came back is no status") from None
    return content


def _watch(url: str, key: str, pause: float) -> None:
    console = _console()
    before, asked = _read(url, key), time.monotonic()
    console.clear()
    console.print(_shown(before, {}, 1.0))
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(max(0.0, pause))
            now, began = _read(url, key), asked
            asked = time.monotonic()
            console.clear()
            console.print(_shown(now, before, asked - began))
            before = now


def _shown(content: dict[str, Any], before: dict[str, Any], seconds: float) -> Group:
    """A table; with rates if there is a status of so many seconds before."""
    head = f"{content['model']}, headrace {content['version']}, mesh {content['mesh']}"
    missing = ", ".join(content["missing"])
    table = Table(box=None, pad_edge=False)
    for name in ("instance", "state", "up", "process", *COLUMNS, "load"):
        table.add_column(name, justify="right" if name in ("up", *COLUMNS) else "left")
    former = {one["name"]: one for one in before.get("instances", [])}
    for instance in content["instances"]:
        table.add_row(*_row(instance, former.get(instance["name"], {}), seconds))
    return Group(Text(head), table, *[Text(f"missing: {missing}", "red")] * bool(missing))


def _row(instance: dict[str, Any], former: dict[str, Any], seconds: float) -> Iterator[str | Text]:
    state, load = instance["state"], dict(instance.get("load", {}))
    known = instance["name"].startswith(f"{instance['service']}.")
    yield Text(instance["name"] if known else f"{instance['service']} {instance['name']}")
    yield Text(state, STYLES.get(state, ""))
    yield _duration(instance["age"]) if "age" in instance else ""
    yield Text(f"{instance['pid']} on {instance['host']}" if "pid" in instance else "")
    for name in COLUMNS:
        yield str(load.pop(name, ""))
    same_life = former.get("incarnation") == instance.get("incarnation")
    then = former.get("load", {}) if same_life else {}
    rates = {f"{name}/s": (load[name] - then[name]) / seconds for name in RATED if name in then}
    told = {name: value for name, value in (load | rates).items() if value}
    yield Text("  ".join(f"{name} {_number(value)}" for name, value in told.items()))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _duration(seconds: float) -> str:
    """The two largest units."""
    whole = int(seconds)
    for (large, size), (small, part) in itertools.pairwise(UNITS.items()):
        if whole >= size:
            return f"{whole // size}{large} {whole % size // part}{small}"
    return f"{whole}s"

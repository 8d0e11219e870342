"""The command line of `headrace batch`: its own flags, and those of `headrace serve`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from services.batch.client import RETRIES
from services.batch.own_mesh import own_flags, own_settings
from shared.settings import BadSetting, flag_of

USAGE = "headrace batch INPUT -o OUTPUT [--url URL | --model MODEL and flags of headrace serve]"
STANDARD_STREAM = "-"


def parse_flags(words: Sequence[str]) -> argparse.Namespace:
    """Raises BadSetting, exits on --help. `serve` are the words for `headrace serve`."""
    given = _parser().parse_args(list(words))
    if given.url is None:
        own_settings(given.serve)
    elif given.serve:
        name = given.serve[0].partition("=")[0]
        raise BadSetting(f"{name}: is for a mesh that is started here, not for --url")
    if STANDARD_STREAM not in (given.input, given.output) and _same(given.input, given.output):
        raise BadSetting(f"{given.input} is both input and output")
    return given


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadSetting(message)


class _Keep(argparse.Action):
    """Keeps a flag of `headrace serve` as it was written."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        words = [f"{option}={one}" for one in values] if values else [option]
        namespace.serve = [*namespace.serve, *words]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="headrace batch",
        usage=USAGE,
        description="Answer a file of requests in OpenAI's batch format. Without --url it starts "
        "a mesh for itself, which takes the flags of headrace serve and opens no port.",
        allow_abbrev=False,
    )
    parser.add_argument("input", metavar="INPUT", help="JSON lines, - for standard input")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUTPUT",
        help="file, continued if it is there; - for standard output",
    )
    parser.add_argument("--url", help="of a running server: http://HOST:PORT or unix:PATH")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("HEADRACE_API_KEY", "").split(",")[0],
        help="for --url (default: from HEADRACE_API_KEY)",
    )
    parser.add_argument(
        "--window",
        type=_at_least(1),
        metavar="N",
        help="requests under way at once (default: 256, or twice --max-num-seqs if that is more)",
    )
    parser.add_argument(
        "--max-retries",
        type=_at_least(0),
        default=RETRIES,
        metavar="N",
        help="of a request that finds the server full or away (default: %(default)s)",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="a bar on standard error (default: on a terminal)",
    )
    _add_serve_flags(parser)
    return parser


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(serve=[])
    for setting in own_flags():
        flag = flag_of(setting)
        options: dict[str, Any] = {"action": _Keep, "help": argparse.SUPPRESS}
        if setting.type == "bool":
            no = flag.replace("--", "--no-", 1)
            parser.add_argument(flag, no, nargs=0, **options)
        else:
            several = str(setting.type).startswith("list")
            parser.add_argument(flag, nargs="+" if several else 1, **options)


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return number


def _same(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:  # one of them is not there
        return False

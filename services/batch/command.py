"""`headrace batch`: a file of requests to a file of results."""

from __future__ import annotations

import argparse
import asyncio
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.batch.client import WINDOW, Client
from services.batch.custom_ids import CustomIds
from services.batch.failures import ServerGone
from services.batch.flags import STANDARD_STREAM, parse_flags
from services.batch.lines import read_lines
from services.batch.output import Output, OutputError, open_output
from services.batch.own_mesh import MeshEnded, OwnMesh, own_settings, own_window, quiet
from services.batch.progress import Progress
from services.batch.run import Run, Tally
from shared.settings import BadSetting
from shared.types import EXIT_BAD_SETTING, EXIT_FAULT

GO_ON = "the same command goes on from here"


def batch(words: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        given = parse_flags(words)
        with ExitStack() as stack:
            source = stack.enter_context(_input(given.input))
            ids = CustomIds()
            stack.callback(ids.close)
            output = open_output(given.output, ids.done)
            stack.callback(output.close)
            client = _client(given, stack)
            return _report(given, asyncio.run(_run(given, source, output, ids, client)))
    except (BadSetting, OutputError) as error:
        return _fail(str(error), EXIT_BAD_SETTING)
    except MeshEnded as error:
        reason = f"the mesh ended with code {error.code}; what it said above tells why"
        return _fail(reason, EXIT_BAD_SETTING if error.is_usage else EXIT_FAULT)
    except (ServerGone, _Broken) as error:
        return _fail(str(error), EXIT_FAULT)
    except KeyboardInterrupt:
        return _fail(f"interrupted; {GO_ON}", 128 + signal.SIGINT)
    except asyncio.CancelledError:
        return _fail(f"told to stop; {GO_ON}", 128 + signal.SIGTERM)


class _Broken(Exception):
    """The results could not be written any more."""


@contextmanager
def _input(name: str) -> Iterator[int]:
    """Its descriptor; raises BadSetting."""
    if name == STANDARD_STREAM:
        yield sys.stdin.fileno()
        return
    try:
        file = Path(name).open("rb", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise BadSetting(f"cannot read {name}: {error.strerror}") from None
    with file:
        yield file.fileno()


def _client(given: argparse.Namespace, stack: ExitStack) -> Client:
    """To the given server, or to a mesh that lives as long as the stack; raises BadSetting."""
    retries = given.max_retries
    if given.url is None:
        window = given.window or own_window(own_settings(given.serve))
        mesh = stack.enter_context(OwnMesh(quiet(given.serve)))
        return Client(mesh.url, window=window, retries=retries, check=mesh.check)
    window = given.window or WINDOW
    try:
        return Client(given.url, api_key=given.api_key, window=window, retries=retries)
    except ValueError as error:
        raise BadSetting(f"--url: {error}") from None


async def _run(
    given: argparse.Namespace, source: int, output: Output, ids: CustomIds, client: Client
) -> Tally:
    _stop_on_signals()
    async with client:
        await (client.wait_ready() if given.url is None else client.probe())
        total = await asyncio.to_thread(_count, given.input)
        with Progress(total, given.progress) as progress:
            run = Run(client, output, ids, progress)
            try:
                await run.run(read_lines(source))
            except OutputError as error:
                raise _Broken(str(error)) from None
            return run.tally


def _stop_on_signals() -> None:
    """As asyncio.run does for Ctrl-C."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)


def _count(name: str) -> int | None:
    """Lines that are not empty, of a file."""
    if name == STANDARD_STREAM or not stat.S_ISREG(Path(name).stat().st_mode):
        return None
    with Path(name).open("rb") as file:
        return sum(not line.isspace() for line in file)


def _report(given: argparse.Namespace, tally: Tally) -> int:
    parts = [f"{tally.succeeded} answered", f"{tally.failed} failed"]
    if tally.done_before:
        parts.append(f"{tally.done_before} answered before")
    if tally.empty:
        parts.append(f"{tally.empty} empty lines")
    _say(", ".join(parts))
    return EXIT_FAULT if tally.failed else 0


def _fail(reason: str, code: int) -> int:
    _say(reason)
    return code


def _say(line: str) -> None:
    print(f"headrace batch: {line}", file=sys.stderr, flush=True)

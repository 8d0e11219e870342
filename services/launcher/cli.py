"""The `headrace` command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shared.types import EXIT_BAD_SETTING, ServiceName

USAGE = f"""\
usage: headrace serve [MODEL] [flags]   a whole mesh on this machine
       headrace prepare [MODEL]         fetch or convert a model, print its directory
       headrace batch INPUT -o OUTPUT   answer a file of requests
       headrace status [URL]            show who is in a running mesh, and what each is at
       headrace trace [flags]           save what a running mesh just did, as a timeline
       headrace keys DIRECTORY          make the keys of a mesh over TCP
       headrace SERVICE [flags]         one service instance, for containers
       headrace --version

MODEL is a local directory, a GGUF file or a hub id; without one, SmolLM2-135M-Instruct.
SERVICE is one of {", ".join(ServiceName)}.
Each command explains its flags with --help; HEADRACE_* variables set them too."""


def main() -> NoReturn:
    # What a command needs is loaded within: Ctrl-C is quiet meanwhile, too.
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run a command; returns its exit code."""
    match words:
        case ["serve", *rest]:
            from services.launcher.serve import serve

            return serve(rest)
        case ["prepare", *rest] if len(rest) < 2 and not any(w.startswith("-") for w in rest):
            return _prepare(*rest)
        case ["batch", *rest]:
            from services.batch.command import batch

            return batch(rest)
        case ["status", *rest]:
            from services.launcher.status import status

            return status(rest)
        case ["trace", *rest]:
            from services.launcher.trace import trace

            return trace(rest)
        case ["keys", directory] if not directory.startswith("-"):
            return _make_keys(directory)
        case [name, *rest] if name in set(ServiceName):
            module = f"services.{name.replace('-', '_')}"
            os.execv(sys.executable, [sys.executable, "-P", "-m", module, *rest])
        case ["--version" | "-V"]:
            from importlib.metadata import version

            print(f"headrace {version('headrace')}")
            return 0
        case ["--help" | "-h" | "help"]:
            print(USAGE)
            return 0
    print(USAGE, file=sys.stderr)
    return EXIT_BAD_SETTING


def _prepare(model: str = "") -> int:
    from services.launcher.models import ModelError, prepare_model

    try:
        print(prepare_model(model, lambda line: print(line, file=sys.stderr, flush=True)))
    except ModelError as error:
        print(f"headrace prepare: {error}", file=sys.stderr)
        return EXIT_BAD_SETTING
    return 0


def _make_keys(directory: str) -> int:
    from shared.mesh.curve import make_keys

    try:
        print(f"{make_keys(Path(directory))}: give every instance --mesh-keys with a copy of it")
    except OSError as error:
        print(f"headrace keys: {error}", file=sys.stderr)
        return EXIT_BAD_SETTING
    return 0

"""`headrace serve`: a whole mesh on this machine, behind one HTTP address."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import setproctitle

from services.launcher.instance import Inheritance
from services.launcher.listener import base_url, http_listener, refuse_all
from services.launcher.models import DEFAULT_NAME, ModelError, prepare_model
from services.launcher.readiness import wait_ready
from services.launcher.supervisor import StartFailed, Supervisor, instances_of
from shared.logs import configure_logs
from shared.model import read_model_info
from shared.service import LIFELINE_VARIABLE
from shared.settings import BadSetting, Settings, parse_settings
from shared.types import EXIT_BAD_SETTING, EXIT_FAULT

LONGEST_RUN_DIRECTORY = 64  # bytes; socket names follow, and a path may have 107 in all
FIXED = {  # what the launcher decides for its children
    "mesh": "",
    "index": 0,
    "listen_fd": None,
    "mesh_host": "127.0.0.1",
    "mesh_port": None,
    "allow_plain_tcp": False,
}


def serve(words: Sequence[str]) -> int:
    """Run until a signal; returns the exit code."""
    began = time.monotonic()
    try:
        settings = _parse(words)
        setproctitle.setproctitle("headrace: launcher")  # at once: there may be keys in the words
        configure_logs(settings.log_level, settings.log_format, "launcher", 0)
        with http_listener(settings) as listener:
            _check_device(settings)
            settings = _with_model(settings)
            asyncio.run(_run(settings, listener, began))
    except (BadSetting, ModelError) as error:
        _say(f"headrace serve: {error}")
        return EXIT_BAD_SETTING
    except StartFailed as error:
        _say(f"headrace serve: {error}; the log above says why")
        return EXIT_FAULT
    return 0


def _parse(words: Sequence[str]) -> Settings:
    if words and not words[0].startswith("-"):
        words = ["--model", *words]
    return parse_settings(None, words, os.environ, **FIXED)


def _check_device(settings: Settings) -> None:
    """Say at once what the executor would find out after seconds of loading; raises BadSetting."""
    if settings.device != "cuda" or Path("/dev/kfd").exists():  # an AMD GPU's
        return
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver's, without which no NVIDIA GPU can be used
    except OSError:
        raise BadSetting(
            "--device cuda: no GPU with a driver is here; without this, the CPU is used"
        ) from None


def _with_model(settings: Settings) -> Settings:
    """The settings with the prepared directory as model and its name in the API."""
    directory = prepare_model(settings.model, _say)
    try:
        read_model_info(directory, settings.max_model_len)
    except ValueError as error:
        raise BadSetting(str(error)) from None
    names = settings.served_model_name or [_served_name(settings.model)]
    return replace(settings, model=str(directory), served_model_name=names)


def _served_name(model: str) -> str:
    """A hub id as it is, of a path its last part."""
    if not model:
        return DEFAULT_NAME
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


async def _run(settings: Settings, listener: socket.socket, began: float) -> None:
    url = base_url(listener, secure=settings.ssl_certfile is not None)
    run_directory = _make_run_directory()
    lifeline, held = os.pipe()  # the children notice when `held` closes with this process
    os.set_inheritable(lifeline, True)
    settings = replace(settings, mesh=f"ipc:{run_directory}")

    async def ready() -> None:
        await wait_ready(url, _say)
        if LIFELINE_VARIABLE not in os.environ:  # else a program started us, which knows the way
            _say(_greeting(url, settings, time.monotonic() - began))

    try:
        inheritance = Inheritance(settings, lifeline, listener.fileno())
        instances = instances_of(settings, inheritance)
        _say(f"headrace: starting {len(instances)} processes for {settings.served_model_name[0]}")
        stopping = partial(refuse_all, listener)
        supervisor = Supervisor(instances, run_directory, settings.drain_timeout, ready, stopping)
        await supervisor.run()
    finally:
        shutil.rmtree(run_directory, ignore_errors=True)
        os.close(lifeline)
        os.close(held)


def _make_run_directory() -> Path:
    """A private (0700) directory whose path leaves room for socket names."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_RUN_DIRECTORY or not os.access(base, os.W_OK):
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="headrace-", dir=base))


def _greeting(url: str, settings: Settings, seconds: float) -> str:
    unverified = "-k " if url.startswith("https:") else ""  # it may be made out to another name
    secured = settings.api_key or settings.api_key_file
    key = "-H 'Authorization: Bearer YOUR_KEY' " if secured else ""
    model = settings.served_model_name[0]
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    place, target = f"{url}/v1", url
    if settings.uds is not None:
        place, target = url, f"--unix-socket {shlex.quote(settings.uds)} http://localhost"
    return (
        f"headrace: ready after {seconds:.1f} s at {place}, model {model}\n"
        f"Try:\n  curl {unverified}{target}/v1/chat/completions {key}"
        "-H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(body)}"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

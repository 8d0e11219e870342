"""A mesh of one's own: `headrace serve` as a child, on a unix socket in a private directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Self

from services.batch.client import WINDOW
from services.batch.failures import ServerGone
from shared.service import LIFELINE_VARIABLE
from shared.settings import Settings, flag_of, parse_settings, variable_of
from shared.types import EXIT_BAD_SETTING
from shared.unix_socket import PREFIX

LONGEST_BASE = 64  # bytes; the path of a socket may have 107 in all
QUIET = "--log-level=warning"
LAST_WORDS_SECONDS = 1.0  # to read what it said at its end
STOP_SECONDS = 10.0  # nothing is left to drain when it is told to stop
LISTENING = {"host", "port", "uds", "listen_fd", "api_key", "api_key_file", "allowed_origins"}
LISTENING |= {"ssl_certfile", "ssl_keyfile"}
MESH = {"mesh", "index", "mesh_host", "mesh_port", "mesh_keys", "allow_plain_tcp"}
NOT_ITS_OWN = LISTENING | MESH  # where and for whom it listens is decided here


class OwnMesh:
    """The processes of one mesh; a context manager that leaves none of them behind.

    They end with this process, however that ends.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._directory = _private_directory()
        self._socket = self._directory / "http.sock"
        self._last_words: deque[str] = deque(maxlen=5)
        self._process: subprocess.Popen[str] | None = None
        self._held = -1
        self._stopping = False

    @property
    def url(self) -> str:
        return f"{PREFIX}{self._socket}"

    def __enter__(self) -> Self:
        lifeline, self._held = os.pipe()  # the child notices when `held` closes with this process
        command = [sys.executable, "-P", "-m", "services.launcher", "serve"]
        try:
            self._process = subprocess.Popen(
                [*command, f"--uds={self._socket}", *self._words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=_environment(lifeline),
                pass_fds=[lifeline],
                start_new_session=True,  # Ctrl-C is for this process, which then ends it in order
            )
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(lifeline)
        self._relaying = threading.Thread(target=self._relay, args=(self._process,), daemon=True)
        self._relaying.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raises MeshEnded if it has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._relaying.join(LAST_WORDS_SECONDS)
            raise MeshEnded(code, " | ".join(self._last_words))

    def stop(self) -> None:
        """End all of its processes, and wait for that."""
        self._stopping = True
        try:
            if self._process is not None:
                _end(self._process)
        finally:
            if self._held >= 0:
                os.close(self._held)
                self._held = -1
            shutil.rmtree(self._directory, ignore_errors=True)

    def _relay(self, process: subprocess.Popen[str]) -> None:
        """What it says goes to standard error, as it is at the time: a notebook has its own."""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self._last_words.append(line.strip())
                if not self._stopping:  # at its end each service tells of the loss of others
                    print(line, end="", file=sys.stderr, flush=True)


class MeshEnded(ServerGone):
    """It ended by itself; `is_usage` if by a setting or a model that cannot be used."""

    def __init__(self, code: int, last_words: str) -> None:
        super().__init__(f"the mesh ended with code {code}: {last_words}")
        self.code = code
        self.is_usage = code == EXIT_BAD_SETTING


def own_flags() -> list[Field[Any]]:
    """The settings of `headrace serve` that are left to the user."""
    return [setting for setting in fields(Settings) if setting.name not in NOT_ITS_OWN]


def own_settings(words: Sequence[str]) -> Settings:
    """What these flags of `headrace serve` and its variables say; raises BadSetting."""
    fixed = {s.name: _default(s) for s in fields(Settings) if s.name in NOT_ITS_OWN}
    return parse_settings(None, words, os.environ, **fixed)


def own_window(settings: Settings) -> int:
    """Requests under way that keep it busy."""
    return max(WINDOW, 2 * settings.max_num_seqs)


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Flags given as Python names and values; raises TypeError for a name that is none."""
    settings = {setting.name: setting for setting in own_flags()}
    words: list[str] = []
    for name, value in flags.items():
        if name not in settings:
            raise TypeError(f"{name!r} is no flag of a mesh of one's own")
        flag = flag_of(settings[name])
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"{flag}={one}" for one in values]
    return words


def quiet(words: Sequence[str]) -> list[str]:
    """With a log of warnings only, unless another was asked for."""
    asked = any(word.startswith("--log-level") for word in words)
    return [*words] if asked or "HEADRACE_LOG_LEVEL" in os.environ else [*words, QUIET]


def _default(setting: Field[Any]) -> Any:
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return setting.default


def _environment(lifeline: int) -> dict[str, str]:
    """As ours, but for what would tell it where and for whom to listen."""
    dropped = {variable_of(s) for s in fields(Settings) if s.name in NOT_ITS_OWN}
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    return own | {LIFELINE_VARIABLE: str(lifeline)}


def _private_directory() -> Path:
    """Mode 0700, and a path that leaves room for the socket's name."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_BASE:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="headrace-batch-", dir=base))


def _end(process: subprocess.Popen[str]) -> None:
    """In order if it can; a second SIGTERM ends a mesh at once."""
    try:
        for _ in range(2):
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
                return
            except subprocess.TimeoutExpired:
                pass
    finally:
        if process.poll() is None:
            process.kill()  # its own children end when it does
            process.wait()

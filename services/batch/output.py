"""The file of results: only ever whole lines, and continued where a former run ended."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from services.batch.client import Answer
from services.batch.failures import RequestFailed

STANDARD_OUTPUT = "-"
ID_PREFIX = "batch_req_"


class OutputError(Exception):
    """The results cannot be written there; the text is one clear line."""


class Output:
    """Appends results; each is in the system's hands when `write` returns."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name

    def write(
        self,
        identity: str,
        line: int,
        custom_id: str | None,
        answer: Answer | None,
        failure: RequestFailed | None,
    ) -> None:
        """Of the request at this line of the input; raises OutputError."""
        result = {
            "id": identity,
            "custom_id": custom_id,
            "response": answer and _response(answer),
            "error": failure and _error(failure, line),
        }
        try:
            self._file.write(json.dumps(result).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write {self._name}: {error.strerror}") from None

    def close(self) -> None:
        with suppress(OSError):  # of what `write` has complained of
            self._file.close()


def open_output(name: str, done: Callable[[str], None]) -> Output:
    """Open a new file, or one of a former run: `done` is told which requests it has answers to.

    Whatever else a former run left there is taken out, as it will be asked again: failures, and
    half a line at the end. Raises OutputError, also if another run writes there just now.
    """
    if name == STANDARD_OUTPUT:
        return Output(open(sys.stdout.fileno(), "wb", closefd=False), "standard output")
    try:
        file: BinaryIO = Path(name).open("a+b")  # noqa: SIM115 - the output closes it
    except OSError as error:
        raise OutputError(f"cannot write {name}: {error.strerror}") from None
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _lock(file.fileno(), name)
            file = _continued(file, Path(os.path.realpath(name)), done)
    except OSError as error:
        file.close()
        raise OutputError(f"cannot continue {name}: {error.strerror}") from None
    except BaseException:
        file.close()
        raise
    return Output(file, name)


def _lock(descriptor: int, name: str) -> None:
    """Held until it is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another run writes to {name}") from None


def _continued(file: BinaryIO, path: Path, done: Callable[[str], None]) -> BinaryIO:
    """The file with nothing but successes in it, locked, at its end."""
    dropped = 0
    for custom_id, _ in _results(file, path):
        if custom_id is None:
            dropped += 1
        else:
            done(custom_id)
    if not dropped:
        return file
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as made:
        try:
            _lock(made.fileno(), str(path))
            os.fchmod(made.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            made.writelines(line for custom_id, line in _results(file, path) if custom_id)
            made.flush()
            os.fsync(made.fileno())
            Path(made.name).rename(path)  # so it has either all of the old lines or all of the new
        except BaseException:
            Path(made.name).unlink(missing_ok=True)
            raise
        continued = os.fdopen(os.dup(made.fileno()), "a+b")  # which shares the lock
    file.close()
    return continued


def _results(file: BinaryIO, path: Path) -> Iterator[tuple[str | None, bytes]]:
    """Each line, with its custom_id if it is a success; raises OutputError for a foreign file."""
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):  # the run was killed while it wrote this one
            yield None, line
            return
        result = _parsed(line)
        if result is None:
            raise OutputError(f"{path}: line {number} is no result of a batch; name another file")
        yield result["custom_id"] if _is_success(result) else None, line


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_result = isinstance(result, dict) and {"custom_id", "response", "error"} <= result.keys()
    return result if is_result else None


def _is_success(result: dict[str, Any]) -> bool:
    return result["error"] is None and isinstance(result["custom_id"], str)


def _response(answer: Answer) -> dict[str, Any]:
    return {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": answer.body,
    }


def _error(failure: RequestFailed, line: int) -> dict[str, Any]:
    return {
        "code": failure.code or str(failure.status),
        "message": failure.message,
        "param": failure.param,
        "line": line,
    }

"""API keys: who may come in, and what they are called here."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from hashlib import blake2b, sha256

import structlog

from services.gateway.watched import Watched

NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):\s+(\S.*)")
DIGEST_SIZE = 4  # bytes, of a key without a name

Known = list[tuple[bytes, str]]  # digest of a key, and its name


class BadKeyFile(ValueError):
    """The text says why, and holds no key."""


class ApiKeys:
    """Those of the settings, and those of a file, which is read again when it changes."""

    def __init__(self, keys: Sequence[str] = (), file: str | None = None) -> None:
        """Raises OSError or BadKeyFile for a file that cannot be used."""
        self._own: Known = [(_digest(key), f"key{number}") for number, key in enumerate(keys)]
        self._file = file
        self._watched = None if file is None else Watched(file)
        self._known = self._own + ([] if file is None else read_keys(file))
        self._problem = ""  # that was told
        self._log = structlog.get_logger("keys")

    def __bool__(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._known)

    def name_of(self, sent: bytes) -> str | None:
        """The name of this key; None if it is none of ours."""
        # Every key is compared, each in constant time, and of all the same number of bytes.
        digest = sha256(sent).digest()
        found = [name for known, name in self._known if hmac.compare_digest(digest, known)]
        return found[0] if found else None

    def refresh(self) -> None:
        """Take over the file's keys if they are others; an unusable one changes nothing."""
        if self._watched is None or self._file is None:
            return
        try:
            if not self._watched.changed():
                return
            read = read_keys(self._file)
        except (OSError, BadKeyFile) as error:
            if str(error) != self._problem:
                self._log.error("API keys not taken over, the old ones stay", reason=str(error))
            self._problem = str(error)
        else:
            self._problem = ""
            self._known = self._own + read
            self._log.info("API keys taken over", file=self._file, keys=len(read))


def read_keys(file: str) -> Known:
    """One key a line, or `name: key`; `#` begins a comment. Raises OSError, BadKeyFile."""
    with open(file, encoding="utf-8", errors="surrogateescape") as content:
        lines = [line.strip() for line in content]
    known = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        named = NAMED.fullmatch(line)
        key = named[2] if named else line
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise BadKeyFile(f"line {number} of {file} is neither KEY nor NAME: KEY")
        known.append((_digest(key), named[1] if named else _unnamed(key)))
    if not known:
        raise BadKeyFile(f"{file} holds no key")
    return known


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _unnamed(key: str) -> str:
    """The same wherever it stands in the file."""
    return f"key-{blake2b(key.encode(), digest_size=DIGEST_SIZE).hexdigest()}"

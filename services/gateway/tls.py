"""The certificate of HTTPS, read again when its files change."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import TypeAlias

import structlog

from shared.tls import server_context

LOOK_SECONDS = 5.0  # from one look at the files to the next

Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


class Certificate:
    """A context for new connections; those that stand keep what they began with."""

    def __init__(self, certfile: str, keyfile: str) -> None:
        """Raises OSError or ssl.SSLError for a pair that cannot be used."""
        self._files = (certfile, keyfile)
        self._stamp = self._look()
        self.context = server_context(certfile, keyfile)
        self._problem = ""  # that was told
        self._log = structlog.get_logger("tls")

    async def watch(self) -> None:
        """Take over a new pair whenever there is one; a broken one is told once and left."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            server_context(*self._files)  # a broken pair would spoil the context that is in use
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            if str(error) != self._problem:
                self._log.error("certificate not taken over, the old one stays", reason=str(error))
            self._problem = str(error)
        else:
            self._problem = ""
            self._log.info("certificate taken over", certfile=self._files[0])

    def _look(self) -> Stamp:
        found = [os.stat(path) for path in self._files]  # through links: secrets are swapped so
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)

"""The certificate of HTTPS, read again when its files change."""

from __future__ import annotations

import ssl

import structlog

from services.gateway.watched import Watched
from shared.tls import server_context


class Certificate:
    """A context for new connections; those that stand keep what they began with."""

    def __init__(self, certfile: str, keyfile: str) -> None:
        """Raises OSError or ssl.SSLError for a pair that cannot be used."""
        self._files = (certfile, keyfile)
        self._watched = Watched(certfile, keyfile)
        self.context = server_context(certfile, keyfile)
        self._problem = ""  # that was told
        self._log = structlog.get_logger("tls")

    def refresh(self) -> None:
        """Take over a new pair if there is one; a broken one is told once and left."""
        try:
            if not self._watched.changed():
                return
            server_context(*self._files)  # a broken pair would spoil the context that is in use
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            if str(error) != self._problem:
                self._log.error("certificate not taken over, the old one stays", reason=str(error))
            self._problem = str(error)
        else:
            self._problem = ""
            self._log.info("certificate taken over", certfile=self._files[0])

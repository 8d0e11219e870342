"""CurveZMQ: every member of a mesh has the mesh's one key pair, and nobody else gets in.

https://rfc.zeromq.org/spec/26/ (CurveZMQ), https://rfc.zeromq.org/spec/27/ (ZAP)
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.asyncio import AsyncioAuthenticator

from shared.rarely import Rarely
from shared.settings import BadSetting

NAME = "mesh"
DOMAIN = "headrace"  # ZAP is only asked about sockets that have one


@dataclass(frozen=True, slots=True)
class MeshKeys:
    """Z85 text, as ZeroMQ takes it."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, directory: Path) -> MeshKeys:
        """Read what `make_keys` wrote; raises BadSetting."""
        file = _secret_file(directory)
        try:
            public, secret = load_certificate(file)
        except (OSError, ValueError) as error:
            raise BadSetting(f"--mesh-keys: {file} cannot be read: {error}") from None
        if not public or not secret:
            raise BadSetting(f"--mesh-keys: {file} holds no key pair")
        if _others_can_read(file.stat()):
            raise BadSetting(f"--mesh-keys: others can read {file}; chmod 600 it")
        return cls(public, secret)

    def protect_inbox(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound: only members are let in, as the context's Gatekeeper finds."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)
        socket.set_string(zmq.ZAP_DOMAIN, DOMAIN)

    def protect_peer(self, socket: zmq.Socket[bytes]) -> None:
        """Before it connects: only a member is spoken to."""
        socket.set(zmq.CURVE_SERVERKEY, self.public)
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)


def make_keys(directory: Path) -> Path:
    """Write a new key pair; returns its file. Raises FileExistsError, OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = _secret_file(directory)
    if file.exists():
        raise FileExistsError(f"{file} exists; a mesh whose members differ in it falls apart")
    mask = os.umask(0o077)
    try:
        create_certificates(directory, NAME)
    finally:
        os.umask(mask)
    return file


def _others_can_read(status: os.stat_result) -> bool:
    """A file of root's may be its group's: so Kubernetes gives a secret to a user in a pod."""
    group_may = status.st_uid == 0 != os.geteuid() and status.st_gid in os.getgroups()
    return bool(status.st_mode & (0o037 if group_may else 0o077))


def _secret_file(directory: Path) -> Path:
    return directory / f"{NAME}.key_secret"


class Gatekeeper:
    """Answers ZeroMQ's question who may connect, for all inboxes of a context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: MeshKeys) -> None:
        self._public = keys.public
        self._log = Rarely("mesh")
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback(DOMAIN, self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator for each connection that knows the inbox's public key."""
        known = hmac.compare_digest(key, self._public)
        if not known:
            self._log.warning("stranger turned away", "key", key=key.decode("ascii", "replace"))
        return known

    def close(self) -> None:
        self._authenticator.stop()

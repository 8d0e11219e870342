"""Finding inboxes: which instances of a service exist, and where.

Only what discovery gives is ever connected to; no message can name an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared.mesh.curve import MeshKeys
from shared.settings import BadSetting, Settings
from shared.types import ServiceName

DEFAULT_PORTS = {
    ServiceName.GATEWAY: 7101,
    ServiceName.TOKENIZER: 7102,
    ServiceName.SCHEDULER: 7103,
    ServiceName.MODEL_EXECUTOR: 7104,
    ServiceName.DETOKENIZER: 7105,
}
HOST_PORT = re.compile(r"[^:/\s]+:[1-9][0-9]{0,4}")
IPC_PATH_LIMIT = 107  # bytes in sockaddr_un.sun_path, less the terminator


class Resolver(Protocol):
    """From a service to its instances, as name -> endpoint."""

    async def resolve(self, service: ServiceName) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class IpcDirectory:
    """One machine: the sockets in a private directory are the registry."""

    directory: Path

    async def resolve(self, service: ServiceName) -> Mapping[str, str]:
        try:
            entries = os.listdir(self.directory)
        except FileNotFoundError:  # the launcher is gone, and another orphan cleaned up
            return {}
        names = [
            entry.removesuffix(".sock")
            for entry in entries
            if entry.startswith(f"{service}.") and entry.endswith(".sock")
        ]
        return {name: self.endpoint(name) for name in names}

    def endpoint(self, name: str) -> str:
        path = str(self.directory / f"{name}.sock")
        if len(os.fsencode(path)) > IPC_PATH_LIMIT:
            raise BadSetting(f"--mesh: socket path of over {IPC_PATH_LIMIT} bytes: {path}")
        return f"ipc://{path}"


@dataclass(frozen=True, slots=True)
class StaticList:
    """A fixed list of host:port for each service."""

    addresses: Mapping[ServiceName, tuple[str, ...]]

    async def resolve(self, service: ServiceName) -> Mapping[str, str]:
        return {name: f"tcp://{name}" for name in self.addresses.get(service, ())}


@dataclass(frozen=True, slots=True)
class Dns:
    """The A records of the service's name (compose service, Kubernetes headless service)."""

    domain: str  # appended to the service's name, with its dot; may be empty

    async def resolve(self, service: ServiceName) -> Mapping[str, str]:
        loop = asyncio.get_running_loop()
        port = DEFAULT_PORTS[service]
        try:
            found = await loop.getaddrinfo(
                f"{service}{self.domain}", port, family=socket.AF_INET, type=socket.SOCK_STREAM
            )
        except socket.gaierror:
            return {}
        names = {f"{address[4][0]}:{port}" for address in found}
        return {name: f"tcp://{name}" for name in names}


@dataclass(frozen=True, slots=True)
class MeshAddress:
    """Where this instance binds, how others name it, and how it finds them."""

    name: str
    bind: str
    resolver: Resolver
    keys: MeshKeys | None = None  # None: links are neither encrypted nor authenticated

    @classmethod
    def from_settings(cls, service: ServiceName, settings: Settings) -> MeshAddress:
        """Read `--mesh`; raises BadSetting."""
        kind, _, rest = settings.mesh.partition(":")
        if kind == "ipc" and rest:
            directory = IpcDirectory(Path(rest))
            if not directory.directory.is_dir():
                raise BadSetting(f"--mesh: no directory {rest}")
            name = f"{service}.{settings.index}"
            return cls(name, directory.endpoint(name), directory)
        if kind not in ("dns", "static"):
            raise BadSetting("--mesh: give ipc:DIRECTORY, dns or static:SERVICE=HOST:PORT,...")
        if (settings.mesh_keys is None) != settings.allow_plain_tcp:
            raise BadSetting(
                "--mesh: over TCP it needs either --mesh-keys (`headrace keys` makes them), or"
                " --allow-plain-tcp, which lets anybody in who can reach it"
            )
        keys = None if settings.mesh_keys is None else MeshKeys.load(Path(settings.mesh_keys))
        port = settings.mesh_port or DEFAULT_PORTS[service]
        resolver = Dns(f".{rest}" if rest else "") if kind == "dns" else _static_list(rest)
        name = f"{_advertised(settings.mesh_host)}:{port}"
        if isinstance(resolver, StaticList) and name not in resolver.addresses.get(service, ()):
            raise BadSetting(f"--mesh: this {service} is {name}, which is not in the list")
        return cls(name, f"tcp://{settings.mesh_host}:{port}", resolver, keys)

    def leave(self) -> None:
        """Unlink the inbox: libzmq leaves the file of an ipc socket behind."""
        if isinstance(self.resolver, IpcDirectory):
            Path(self.bind.removeprefix("ipc://")).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove the directory of an ipc mesh that nobody keeps any more, and all sockets in it."""
        if isinstance(self.resolver, IpcDirectory):
            for path in self.resolver.directory.glob("*.sock"):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # whatever else is there is not ours
                self.resolver.directory.rmdir()


def _static_list(text: str) -> StaticList:
    addresses: dict[ServiceName, tuple[str, ...]] = {}
    for entry in filter(None, text.split(",")):
        service, _, address = entry.partition("=")
        if service not in set(ServiceName) or not HOST_PORT.fullmatch(address):
            raise BadSetting(f"--mesh: {entry!r} is not SERVICE=HOST:PORT")
        known = addresses.get(ServiceName(service), ())
        addresses[ServiceName(service)] = (*known, address)
    return StaticList(addresses)


def _advertised(host: str) -> str:
    """The address by which others find an inbox that listens on `host`."""
    if host not in ("0.0.0.0", "*"):
        return host
    return socket.gethostbyname(socket.gethostname())

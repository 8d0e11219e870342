"""Hosts on one machine: network namespaces with an address each, on a switch between them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SWITCH, BRIDGE = "headrace-switch", "switch"
NETWORK = "198.18.10"  # set aside for tests of networks (RFC 2544)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def switch() -> Iterator[None]:
    """A namespace with a bridge; whoever runs in it has the network's last address."""
    _add(SWITCH)
    try:
        ip("-n", SWITCH, "link", "add", BRIDGE, "type", "bridge")
        ip("-n", SWITCH, "address", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        ip("-n", SWITCH, "link", "set", BRIDGE, "up")
        yield
    finally:
        ip("netns", "delete", SWITCH)


class Host:
    """One namespace, plugged into the switch."""

    def __init__(self, number: int, logs: Path) -> None:
        self.name = f"headrace-host{number}"
        self.address = f"{NETWORK}.{number}"
        self._port = f"port{number}"  # its end of the cable at the switch
        self._logs = logs
        self._processes: list[tuple[subprocess.Popen[bytes], Path]] = []
        _add(self.name)
        peer = ("peer", "name", "cable", "netns", self.name)
        ip("-n", SWITCH, "link", "add", self._port, "type", "veth", *peer)
        ip("-n", SWITCH, "link", "set", self._port, "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "cable")
        for device in ("lo", "cable"):
            ip("-n", self.name, "link", "set", device, "up")
        self.plug()

    def plug(self) -> None:
        ip("-n", SWITCH, "link", "set", self._port, "master", BRIDGE)

    def unplug(self) -> None:
        """Frames get lost from now on, and no end is told of it."""
        ip("-n", SWITCH, "link", "set", self._port, "nomaster")

    def start(self, name: str, *command: str) -> None:
        log = self._logs / f"{self.name}-{name}"
        with log.open("ab") as file:
            words = ["ip", "netns", "exec", self.name, *command]
            self._processes.append((subprocess.Popen(words, stdout=file, stderr=file), log))

    def logs(self) -> str:
        return "".join(log.read_text() for _, log in self._processes)

    def dead(self) -> Sequence[str]:
        """The ends of the logs of processes that have ended."""
        return [log.read_text()[-600:] for one, log in self._processes if one.poll() is not None]

    def close(self) -> None:
        for process, _ in self._processes:
            process.terminate()
        for process, _ in self._processes:
            try:
                process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        ip("netns", "delete", self.name)


def _add(name: str) -> None:
    subprocess.run(
        ["ip", "netns", "delete", name], capture_output=True, check=False
    )  # a dead run's
    ip("netns", "add", name)

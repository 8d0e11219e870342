"""Docker, as it is here: the one that runs, or else one of our own for the time of a check.

A machine that can pull no image gets a base of its own by debootstrap, which carries the machine's
certificates and pip configuration, so that builds find the package index as the machine does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checklist import CheckFailed, wait_until

ROOT = Path(__file__).parents[1]
BASE_IMAGE = "python:3.11-slim"
LOCAL_BASE = "headrace-base:local"
# Addresses set aside for tests of networks (RFC 2544), so that no real host is meant by them.
ADDRESSES = ("--bip", "198.18.0.1/24", "--default-address-pool", "base=198.18.128.0/17,size=24")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_INDEX_SETTINGS = ("index-url", "extra-index-url", "find-links")


def run(*words: str, env: dict[str, str] | None = None, **options: Any) -> str:
    """A command's standard output; raises CheckFailed with the end of its errors."""
    result = subprocess.run(
        words,
        env=os.environ | (env or {}),
        text=True,
        capture_output=True,
        **options,
    )
    if result.returncode:
        told = (result.stderr.strip() or result.stdout.strip())[-1500:]
        raise CheckFailed(f"{' '.join(words[:4])} ...: exit code {result.returncode}: {told}")
    return str(result.stdout)


@dataclass
class Docker:
    """Docker's command line, and what the images are built from."""

    env: dict[str, str] = field(default_factory=dict)
    build_options: tuple[str, ...] = ()
    base_image: str = BASE_IMAGE

    def __call__(self, *words: str, **options: Any) -> str:
        return run("docker", *words, env=self.env, **options)

    @property
    def answers(self) -> bool:
        try:
            return bool(self("version", "--format", "{{.Server.Version}}"))
        except (CheckFailed, OSError):
            return False

    def compose_command(self) -> list[str]:
        """Compose as a plugin of docker, or as the program it was before."""
        try:
            self("compose", "version")
        except CheckFailed:
            if shutil.which("docker-compose") is None:
                raise CheckFailed("neither `docker compose` nor docker-compose is here") from None
            return ["docker-compose"]
        return ["docker", "compose"]

    def build(self, target: str, image: str) -> None:
        arguments = ["--build-arg", f"BASE_IMAGE={self.base_image}"]
        if self.base_image == LOCAL_BASE:
            arguments += ["--build-arg", "TORCH_INDEX="]  # the machine's pip knows where torch is
        words = ["build", *self.build_options, *arguments, "--target", target, "--tag", image]
        self(*words, str(ROOT))

    def find_base(self, scratch: Path) -> str:
        """The usual base image if it can be had, else one made of Debian's packages."""
        for words in (("image", "inspect", BASE_IMAGE), ("pull", BASE_IMAGE)):
            try:
                self(*words)
                return BASE_IMAGE
            except CheckFailed:
                continue
        self.base_image = LOCAL_BASE
        self.build_options += ("--network", "host")
        try:
            self("image", "inspect", LOCAL_BASE)
        except CheckFailed:
            _import_base(self, scratch)
        return f"{LOCAL_BASE}, made by debootstrap, as no image can be pulled"


@contextmanager
def docker_here(state: Path) -> Iterator[Docker]:
    """The machine's Docker; if none runs, one of our own that keeps everything below `state`."""
    docker = Docker()
    if docker.answers:
        yield docker
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise CheckFailed("Docker does not run, and only root with dockerd installed can start it")
    address = f"unix://{state}/docker.sock"
    # The old builder needs no plugin beside the client.
    docker = Docker(env={"DOCKER_HOST": address, "DOCKER_BUILDKIT": "0"})
    had_bridge = Path("/sys/class/net/docker0").exists()
    daemon = _start_daemon(state, address)
    try:
        wait_until(lambda: docker.answers or daemon.poll() is not None, 60, "dockerd answers")
        if daemon.poll() is not None:
            raise CheckFailed(f"dockerd ended: {(state / 'log').read_text()[-600:]}")
        yield docker
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)
        left = [["umount", str(state / "exec-root/netns/default")]]  # by dockerd
        if not had_bridge:
            left.append(["ip", "link", "delete", "docker0"])
        for command in left:
            subprocess.run(command, capture_output=True, check=False)


def _start_daemon(state: Path, address: str) -> subprocess.Popen[bytes]:
    # Without rules in the host's firewall: containers of one network reach each other without, and
    # Docker's proxy the published ports. So nothing is left behind.
    own = [f"--{name}={state / name}" for name in ("data-root", "exec-root", "pidfile")]
    command = ["dockerd", "--host", address, *own, *ADDRESSES, "--iptables=false"]
    with (state / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _import_base(docker: Docker, scratch: Path) -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise CheckFailed(f"{BASE_IMAGE} cannot be pulled; debootstrap, as root, could make a base")
    with tempfile.TemporaryDirectory(dir=scratch, prefix="base-") as folder:
        root = Path(folder, "root")
        include = "--include=ca-certificates,python3,python3-venv"
        run("debootstrap", "--variant=minbase", include, "bookworm", str(root))
        _copy_configuration(root)
        pack = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        docker("import", "-", LOCAL_BASE, stdin=pack.stdout)
        if pack.wait():
            raise CheckFailed("the base could not be packed")


def _copy_configuration(root: Path) -> None:
    """The machine's certificates, and where its pip finds packages, local folders included."""
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    lines = ["[global]", f"cert = {CERTIFICATES}"]
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        places = [place for place in value.strip("'\"").split() if not place.startswith("file:")]
        if name in PIP_INDEX_SETTINGS and places and f"{name} = " not in "\n".join(lines):
            lines.append(f"{name} = {' '.join(places)}")
            for folder in (Path(place) for place in places):
                if folder.is_absolute() and folder.is_dir():
                    shutil.copytree(folder, root / folder.relative_to("/"), dirs_exist_ok=True)
    (root / "etc/pip.conf").write_text("\n".join(lines) + "\n")

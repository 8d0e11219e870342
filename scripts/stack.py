"""The compose project under test: brought up, asked, scaled, and its containers killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from checklist import CheckFailed, wait_until
from docker_host import ROOT, Docker, run

from services.launcher.models import cache_dir

PROJECT = "headrace-check"
CORE, EXECUTOR = "headrace-check-core", "headrace-check-executor"
IN_MESH = {"executor": "model-executor"}  # whose name in compose is not the mesh's
READY_SECONDS = 240


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


class Stack:
    def __init__(self, docker: Docker) -> None:
        self.docker = docker
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"  # of the first gateway
        own = {"CORE_IMAGE": CORE, "EXECUTOR_IMAGE": EXECUTOR, "PORT": port}
        self._env = docker.env | own | {"BASE_IMAGE": docker.base_image}
        self._compose = [*docker.compose_command(), "--project-name", PROJECT]
        self.scale: dict[str, int] = {}

    def compose(self, *words: str) -> str:
        return run(*self._compose, *words, env=self._env, cwd=ROOT)

    def fill_models(self, name: str) -> None:
        """Copy a model that this machine has prepared, for those who cannot fetch it."""
        start = [*self._compose, *("run", "-T", "--rm", "--no-deps", "--entrypoint", "tar")]
        process = subprocess.Popen(
            [*start, "prepare", "-x", "-C", "/models"],
            env=os.environ | self._env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        with process.stdin as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
            archive.add(cache_dir() / "models" / name, arcname=f"models/{name}")
        if process.wait():
            raise CheckFailed("the model could not be copied into its volume")

    def up(self, **scale: int) -> None:
        """Start what is missing, end what is too much; services not named keep their number."""
        if scale.get("gateway", 1) > self.scale.get("gateway", 1):
            self._env["PORT"] = free_port()  # of the newcomer; the others keep theirs
        self.scale |= scale
        options = [f"--scale={service}={count}" for service, count in self.scale.items()]
        self.compose("up", "--detach", "--no-build", "--no-recreate", *options)

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans")

    def wait_whole(self) -> None:
        """Until a token comes through, and as many instances are in the mesh as were asked for."""
        wait_until(self.ready, READY_SECONDS, "GET /ready answers 200")
        wait_until(
            lambda: self.instances() == Counter(self.expected),
            READY_SECONDS,
            f"the mesh is {self.expected}, and not {dict(self.instances())}",
        )

    @property
    def expected(self) -> Mapping[str, int]:
        services = ("gateway", "tokenizer", "scheduler", "executor", "detokenizer")
        return {IN_MESH.get(name, name): self.scale.get(name, 1) for name in services}

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def instances(self) -> Counter[str]:
        """How many of each service answer."""
        return Counter(service for service, _ in self.events(1))

    def events(self, seconds: int) -> dict[tuple[str, str], Counter[str]]:
        """How often each thing happened in each instance (service, address) of late."""
        try:
            answer = httpx.get(f"{self.url}/trace?seconds={seconds}", timeout=30)
            entries = answer.raise_for_status().json()["traceEvents"]
        except httpx.HTTPError:
            return {}
        processes = {
            entry["pid"]: tuple(entry["args"]["name"].split(" ", 1))
            for entry in entries
            if entry["name"] == "process_name"
        }
        happened: dict[tuple[str, str], Counter[str]] = {
            (str(service), str(name)): Counter() for service, name in processes.values()
        }
        for entry in entries:
            if entry["ph"] != "M":
                service, name = processes[entry["pid"]]
                happened[service, name][entry["name"]] += 1
        return happened

    # --- containers

    def containers(self, service: str) -> dict[str, str]:
        """The running containers of a service: address -> id."""
        found = {}
        for container in self.compose("ps", "--quiet", service).split():
            state = self.inspect(container)
            if state["State"]["Running"]:
                [network] = state["NetworkSettings"]["Networks"].values()
                found[network["IPAddress"]] = container
        return found

    def inspect(self, container: str) -> dict[str, Any]:
        return json.loads(self.docker("inspect", container))[0]

    def kill(self, container: str) -> None:
        """SIGKILL from outside, so that Docker takes it for a crash (as `docker kill` is not)."""
        before = self.inspect(container)
        pid = before["State"]["Pid"]
        rm = ["run", "--rm", "--pid", "host", "--user", "0", "--entrypoint", "bash"]
        self.docker(*rm, CORE, "-c", f"kill -9 {pid}")
        wait_until(
            lambda: self.inspect(container)["RestartCount"] > before["RestartCount"],
            60,
            "Docker starts the killed container again",
        )

    @contextmanager
    def paused(self, container: str) -> Iterator[None]:
        self.docker("pause", container)
        try:
            yield
        finally:
            self.docker("unpause", container)

    def gateways(self) -> list[str]:
        """Where each listens, the oldest first."""
        found = [self.inspect(one) for one in self.containers("gateway").values()]
        found.sort(key=lambda state: state["Created"])
        ports = [state["NetworkSettings"]["Ports"]["8000/tcp"][0]["HostPort"] for state in found]
        return [f"http://127.0.0.1:{port}" for port in ports]

"""Servers in unfriendly places: few open files, no shared memory, long paths, other servers."""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.e2e.crowd import Answer, crowd, post
from tests.e2e.harness import MODEL, RunningMesh, running_mesh

SIMULATED = ("--device", "simulated", "--sim", "base=0.002")
HAS_IPV6 = socket.has_ipv6 and Path("/proc/net/if_inet6").exists()
CONNECTIONS = 1500


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow the test itself more open files than usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * CONNECTIONS:
        pytest.skip("this user may not open enough files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CONNECTIONS, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def handles(mesh: RunningMesh) -> dict[str, int]:
    children = psutil.Process(mesh.process.pid).children()
    return {child.cmdline()[0]: child.num_fds() for child in children}


@pytest.mark.skipif(not shutil.which("prlimit"), reason="needs prlimit")
def test_more_connections_than_files(model_dir: Path, many_files: None) -> None:
    """R085: with `ulimit -n 1024`, 1,500 get an answer each, and a stream goes on beside them."""
    limited = ("prlimit", "--nofile=512:1024")
    with running_mesh(model_dir, *SIMULATED, within=limited) as mesh:
        assert "too few open files are allowed" in mesh.log.read_text()
        assert resource.prlimit(mesh.child("gateway 0").pid, resource.RLIMIT_NOFILE) == (1024, 1024)
        mesh.text("hi", max_tokens=2)
        mesh.client.close()
        before = handles(mesh)

        async def press() -> tuple[Answer, list[Answer]]:
            body = {"prompt": "A tale", "max_tokens": 2000, "stream": True}
            stream = asyncio.create_task(post(mesh.url, body))
            await asyncio.sleep(0.3)
            short = [{"prompt": f"Hi {number}", "max_tokens": 200} for number in range(CONNECTIONS)]
            others = await crowd(mesh.url, short)
            return await stream, others

        stream, others = asyncio.run(press())
        assert len(stream.text.split()) == 2000
        statuses = Counter(answer.status for answer in others)
        assert statuses.keys() <= {200, 429, 503}, statuses
        assert statuses[200] > 500
        assert statuses[503] > 0
        assert all("retry-after" in answer.head for answer in others if answer.status != 200)
        with mesh.another_client() as client:
            assert client.get("/health").status_code == 200
        deadline = time.monotonic() + 10
        while any(now > before[title] for title, now in handles(mesh).items()):
            assert time.monotonic() < deadline, (before, handles(mesh))
            time.sleep(0.1)


def test_long_paths(model_dir: Path) -> None:
    """R086: of the directory for sockets, with spaces and beyond ASCII, and of the model."""
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        directory = Path(scratch, "wide räume " + "x" * 130)
        directory.mkdir()
        model = Path(scratch, "y" * (200 - len(scratch) - 2))
        model.symlink_to(model_dir)
        assert len(str(model)) >= 199
        places = {"XDG_RUNTIME_DIR": "", "TMPDIR": str(directory)}
        with running_mesh(model, *SIMULATED, **places) as mesh:
            assert mesh.text("hi", max_tokens=3)


def own_mounts() -> list[str]:
    """A command to start another with a shared memory of 1 MB; skips where that is not allowed."""
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not have mounts of its own")
    return command


def test_without_shared_memory(model_dir: Path) -> None:
    """R088: 32 prompts at once, on the real model."""
    with running_mesh(model_dir, "--dtype", "bfloat16", within=own_mounts()) as mesh:
        bodies = [{"prompt": f"{n} " + "mill wheel " * 80, "max_tokens": 2} for n in range(32)]
        answers = asyncio.run(crowd(mesh.url, bodies))
        assert {answer.status for answer in answers} == {200}


def test_four_servers_at_the_same_moment(model_dir: Path) -> None:
    """R089, and R091: each at another kind of address, which has brackets where it needs them."""
    hosts = ["127.0.0.1", "localhost", *(["::1", "::"] if HAS_IPV6 else ["0.0.0.0", "127.0.0.2"])]
    flags = [("--served-model-name", f"at-{host}", "--host", host) for host in hosts]
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:

        def start(own: tuple[str, ...]) -> RunningMesh:
            return stack.enter_context(running_mesh(model_dir, *SIMULATED, *own))

        meshes = dict(zip(hosts, pool.map(start, flags), strict=True))
        assert all(("[" in mesh.url) == (":" in host) for host, mesh in meshes.items())
        for host, mesh in meshes.items():
            names = [model["id"] for model in mesh.client.get("/v1/models").json()["data"]]
            assert names == [MODEL, f"at-{host}"]
            assert mesh.text("hi", max_tokens=2)
        meshes.pop(hosts[0]).process.kill()
        assert len({mesh.text("hi", max_tokens=2) for mesh in meshes.values()}) == 1

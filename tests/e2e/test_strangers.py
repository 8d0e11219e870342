"""R080: whoever reaches a socket of the tree has nothing run there, and ends nothing."""

from __future__ import annotations

import json
import pickle
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest
import zmq

from scripts.frames import Forge
from shared.types import ServiceName
from tests.e2e.harness import RunningMesh, running_mesh

SIM = ("--device", "simulated", "--sim", "base=0.002", "--max-num-seqs", "32")


@pytest.fixture(scope="module")
def mesh(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, *SIM) as mesh:
        yield mesh


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def tree(mesh: RunningMesh) -> list[psutil.Process]:
    launcher = psutil.Process(mesh.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def listening(mesh: RunningMesh) -> tuple[set[str], set[tuple[str, int]]]:
    """All paths and ports where a process of the tree listens."""
    paths, ports = set(), set()
    for process in tree(mesh):
        with suppress(psutil.NoSuchProcess):
            paths |= {str(one.laddr) for one in process.net_connections("unix") if one.laddr}
            ports |= {
                (one.laddr.ip, one.laddr.port)
                for one in process.net_connections("inet")
                if one.status == psutil.CONN_LISTEN
            }
    return paths, ports


def test_nothing_is_unpickled_and_garbage_ends_nothing(mesh: RunningMesh, tmp_path: Path) -> None:
    expected = mesh.text("The mill", max_tokens=8)
    before = {process.pid for process in tree(mesh)}
    paths, ports = listening(mesh)
    inboxes = [path for path in paths if path.endswith(".sock")]
    assert len(inboxes) == len(ServiceName)
    assert ports == {("127.0.0.1", int(mesh.url.rpartition(":")[2]))}  # and nothing else over TCP
    mark = tmp_path / "executed"
    pickled = [pickle.dumps(Touch(mark), protocol) for protocol in (0, 2, 4, 5)]
    noise = [bytes(range(256)) * 4, b"\xff" * 1000, b"\x00" * 1000, b"GET / HTTP/1.1\r\n\r\n"]
    for content in (*pickled, *noise):
        for port in ports:
            with suppress(ConnectionError), socket.create_connection(port, timeout=5) as tcp:
                tcp.sendall(content)
        for path in inboxes:
            with suppress(ConnectionError), socket.socket(socket.AF_UNIX) as raw:
                raw.connect(path)
                raw.sendall(content)
    with zmq.Context() as context:
        for path in inboxes:
            with context.socket(zmq.PUSH) as push:
                push.connect(f"ipc://{path}")
                for content in (*pickled, *noise):
                    push.send(content)
                push.send_multipart([*pickled, *noise])
    assert mesh.text("The mill", max_tokens=8) == expected
    assert before <= {process.pid for process in tree(mesh)}  # a child may try grammars by now
    assert not mark.exists()
    frames = 2 * len(inboxes) * (len(pickled) + len(noise))
    while mesh.metric("headrace_mesh_bad_frames_total") < frames:
        pass
    log = mesh.log.read_text()
    lines = [json.loads(line) for line in log.splitlines() if "bad frame dropped" in line]
    assert {line["service"] for line in lines} == set(map(str, ServiceName))
    pickle.loads(pickled[0])  # noqa: S301 - so it would have been seen
    assert mark.exists()


def test_a_mesh_under_attack_serves_all_the_same(mesh: RunningMesh) -> None:
    """The short form of scripts/fuzz_mesh."""
    expected = mesh.text("The mill", max_tokens=8)
    before = {process.pid for process in tree(mesh)}
    inboxes = [path for path in listening(mesh)[0] if path.endswith(".sock")]
    random, sent = Random(3), 0
    with zmq.Context() as context:
        for path in inboxes:
            service = ServiceName(Path(path).name.split(".")[0])
            forge = Forge(random, service, pools={"max_tokens": lambda: [3]}, impostors=False)
            with context.socket(zmq.PUSH) as push:
                push.connect(f"ipc://{path}")
                for _ in range(600):
                    push.send(forge.frame())
                    sent += 1
            assert mesh.text("The mill", max_tokens=8) == expected
    assert mesh.metric("headrace_mesh_bad_frames_total") > 0.2 * sent
    assert before <= {process.pid for process in tree(mesh)}  # a child may try grammars by now
    assert mesh.text("The mill", max_tokens=8) == expected

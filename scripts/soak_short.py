"""The soak's short requests: tens of thousands of them, some of them left, and nothing stays.

Processes remember by design: the newest 32,768 events for `headrace trace`, and prefixes of prompts
as far as there are KV blocks. All of that is filled before anything is measured.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from footprint import Footprint, handles, mesh_processes
from rest import left_behind, settled
from rich.console import Console
from rich.table import Table

FLAGS = [
    *("--device", "simulated", "--sim", "base=0.0005,prefill=0.00001"),
    *("--max-num-seqs", "32", "--num-gpu-blocks-override", "2048", "--log-level", "warning"),
]
CLIENTS = 24
MOST_TOKENS = 12
WARM_UP = 0.1  # so many more requests, before anything is measured
WARM_TEXTS = 18_000  # for the tokenizer: two events each
WARM_TOKENS = 8000  # of a stream, as many as fit into the context; each of an iteration of its own
WARM_STREAMS = 2  # one after the other
ANSWER_SECONDS = 60.0
PATIENCE_SECONDS = 0.03  # at most, of those who leave: before, in or after the answer
MOST_GROWTH = 1.0  # MiB over the last half of the requests: 100 bytes each, if there are 20,000


@dataclass
class Work:
    """What is still to be asked, in a random order."""

    left: list[bool]  # of each request: whether its client leaves
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def _body(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    common = {"max_tokens": rng.randint(1, MOST_TOKENS), "temperature": 0}
    common["stream"] = rng.random() < 0.5
    prompt = f"Request {number} of the mill"
    if rng.random() < 0.5:
        return "/v1/completions", {"prompt": prompt, **common}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **common}


class _Client:
    """Asks one request after the other over one connection, until it leaves one."""

    def __init__(self, url: str, work: Work, rng: random.Random) -> None:
        self._url = url
        self._work = work
        self._rng = rng

    async def run(self) -> None:
        writer: asyncio.StreamWriter | None = None
        while self._work.left:
            leaves = self._work.left.pop()
            if writer is None:
                reader, writer = await asyncio.open_connection(*_address(self._url))
            path, body = _body(self._rng, len(self._work.left))
            writer.write(_request(path, body))
            if leaves:
                await asyncio.sleep(self._rng.random() * PATIENCE_SECONDS)
                writer.transport.abort()
                writer = None
                self._work.counts["left"] += 1
                continue
            async with asyncio.timeout(ANSWER_SECONDS):
                self._check(body, *await _read(reader))
        if writer is not None:
            writer.close()

    def _check(self, body: dict[str, Any], status: int, answer: bytes) -> None:
        if body["stream"]:  # words are tokens, and each begins with a space
            events = [
                json.loads(line[6:]) for line in answer.split(b"\n") if line[:7] == b"data: {"
            ]
            texts = [_text(choice) for event in events for choice in event["choices"]]
            text = "".join(texts)
        elif status == 200:
            text = _text(json.loads(answer)["choices"][0])
        if status == 200 and text.count(" ") == body["max_tokens"]:
            self._work.counts["answered"] += 1
        else:
            self._work.faults.append(f"{body}: {status} {answer[:200]!r}")


async def _warm_up(url: str, work: int, aborts: int, rng: random.Random) -> None:
    await _ask_all(url, work, aborts, rng)

    async def be_a_client(posts: int, path: str, body: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_connection(*_address(url))
        for _ in range(posts):
            writer.write(_request(path, body))
            await _read(reader)
        writer.close()

    long = {"prompt": "A long tale", "max_tokens": WARM_TOKENS, "stream": True}
    async with asyncio.TaskGroup() as group:
        group.create_task(be_a_client(WARM_STREAMS, "/v1/completions", long))
        for _ in range(CLIENTS):
            texts = WARM_TEXTS // CLIENTS
            group.create_task(be_a_client(texts, "/tokenize", {"prompt": "A text"}))


def _address(url: str) -> tuple[str | None, int | None]:
    return urlsplit(url).hostname, urlsplit(url).port


def _request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return (head + f"Content-Length: {len(content)}\r\n\r\n").encode() + content


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("message") or choice.get("delta"))["content"] or ""


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split()[1])
    if b"content-length: " in head:
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return status, await reader.readexactly(length)
    pieces = b""
    while size := int(await reader.readline(), 16):
        pieces += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return status, pieces


async def _ask_all(url: str, requests: int, aborts: int, rng: random.Random) -> Work:
    work = Work([number < aborts for number in range(requests)])
    rng.shuffle(work.left)
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(_Client(url, work, rng).run())
    return work


async def soak_short(url: str, requests: int, aborts: int, rng: random.Random) -> list[str]:
    """Prints what was seen; returns what is wrong."""
    await _warm_up(url, int(WARM_UP * requests), int(WARM_UP * aborts), rng)
    await settled(url)
    mesh = mesh_processes()
    opened = {title: handles(pid) for title, pid in mesh.items()}
    began = time.monotonic()
    async with Footprint(mesh) as footprint:
        work = await _ask_all(url, requests, aborts, rng)
    seconds = time.monotonic() - began
    after = await settled(url)
    wrong = work.faults + left_behind(after)
    table = Table(
        *("process", "MiB first", "last", "growth of the last half", "handles before", "after"),
        title=f"{requests} requests in {seconds:.0f} s: {dict(work.counts)}",
    )
    if mesh_processes() != mesh:
        wrong.append("a process was started anew")
        return wrong
    for title, pid in mesh.items():
        sizes, grown, now = footprint.memory[title], footprint.growth(title), handles(pid)
        table.add_row(
            *(title, f"{sizes[0]:.2f}", f"{sizes[-1]:.2f}", f"{grown:+.2f}"),
            *(str(opened[title]), str(now)),
        )
        if grown > MOST_GROWTH:
            wrong.append(f"{title} grew by {grown:.2f} MiB")
        if now > opened[title]:
            wrong.append(f"{title} has {now - opened[title]} more open files than before")
    Console(width=100).print(table)
    return wrong

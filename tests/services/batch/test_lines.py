"""Lines out of files and pipes, whatever their pieces."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.batch import lines
from services.batch.lines import read_lines


async def all_lines(descriptor: int) -> list[bytes | None]:
    return [line async for line in read_lines(descriptor)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, end: bytes
) -> None:
    monkeypatch.setattr(lines, "CHUNK", chunk)
    path = tmp_path / "in"
    path.write_bytes(b"one\n\nthree \r\nfour" + end)
    with path.open("rb", buffering=0) as file:
        assert await all_lines(file.fileno()) == [b"one", b"", b"three \r", b"four"]


async def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    assert await all_lines(descriptor) == []
    os.close(descriptor)


async def test_a_pipe_is_waited_for_and_the_loop_goes_on() -> None:
    reading, writing = os.pipe()
    source = read_lines(reading)
    first = asyncio.ensure_future(anext(source))
    await asyncio.sleep(0.01)
    assert not first.done()
    os.write(writing, b"one\ntw")
    assert await first == b"one"
    os.write(writing, b"o")
    os.close(writing)
    assert [line async for line in source] == [b"two"]
    os.close(reading)


async def test_a_line_that_is_too_long_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "CHUNK", 4)
    monkeypatch.setattr(lines, "LONGEST_LINE", 10)
    path = tmp_path / "in"
    path.write_bytes(b"one\n" + b"x" * 50 + b"\nthree\n" + b"y" * 50)
    with path.open("rb", buffering=0) as file:
        assert await all_lines(file.fileno()) == [b"one", None, b"three", None]

"""The file of results, and what becomes of it after a run that was cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.batch.client import Answer
from services.batch.failures import RequestFailed
from services.batch.output import OutputError, open_output

OK = Answer(200, "r-1", {"choices": []})
REFUSED = Answer(400, "r-2", {"error": {"message": "bad", "code": None, "param": "top_p"}})


def write(path: Path, done: list[str], *entries: tuple[str | None, Answer | None]) -> None:
    output = open_output(str(path), done.append)
    for line, (custom_id, answer) in enumerate(entries, 1):
        failure = answer.failure if answer else RequestFailed("lost", code="no_answer")
        output.write(f"id-{line}", line, custom_id, answer, failure)
    output.close()


def read(path: Path) -> list[dict[str, Any]]:
    assert path.read_bytes().endswith(b"\n")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_format(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, [], ("a", OK), ("b", REFUSED), (None, None))
    response = {"status_code": 200, "request_id": "r-1", "body": OK.body}
    first, second, third = read(path)
    assert first == {"id": "id-1", "custom_id": "a", "response": response, "error": None}
    assert second["response"]["status_code"] == 400
    assert second["response"]["body"] == REFUSED.body
    assert second["error"] == {"code": "400", "message": "bad", "param": "top_p", "line": 2}
    assert third["response"] is None
    assert third["error"] == {"code": "no_answer", "message": "lost", "param": None, "line": 3}


def test_successes_stay_and_all_else_goes(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, [], ("a", OK), ("b", REFUSED), ("c", OK), (None, None))
    path.chmod(0o640)
    with path.open("ab") as file:
        file.write(b'{"id": "cut off in the mid')
    done: list[str] = []
    write(path, done, ("d", OK))
    assert done == ["a", "c"]
    assert [entry["custom_id"] for entry in read(path)] == ["a", "c", "d"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_successes_is_only_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, [], ("a", OK))
    inode = path.stat().st_ino
    write(path, [], ("b", OK))
    assert path.stat().st_ino == inode
    assert [entry["custom_id"] for entry in read(path)] == ["a", "b"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    write(path, [], ("a", OK), ("b", REFUSED))
    link.symlink_to(path)
    write(link, [], ("c", OK))
    assert link.is_symlink()
    assert [entry["custom_id"] for entry in read(path)] == ["a", "c"]


@pytest.mark.parametrize("content", ["hello\n", "{}\n", '{"custom_id": "a"}\n', "[1]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "precious"
    path.write_text(content)
    with pytest.raises(OutputError, match="line 1 is no result of a batch"):
        open_output(str(path), lambda _: None)
    assert path.read_text() == content


@pytest.mark.parametrize("again", [("a", OK), ("b", REFUSED)])
def test_two_runs_do_not_write_to_one_file(tmp_path: Path, again: tuple[str, Answer]) -> None:
    path = tmp_path / "out"
    write(path, [], again)
    output = open_output(str(path), lambda _: None)  # with a failure in it, it is written anew
    with pytest.raises(OutputError, match="another run writes to"):
        open_output(str(path), lambda _: None)
    output.close()
    open_output(str(path), lambda _: None).close()


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file or directory"):
        open_output(str(tmp_path / "no" / "out"), lambda _: None)
    full = open_output("/dev/full", lambda _: None)
    with pytest.raises(OutputError, match="/dev/full: No space left"):
        full.write("id", 1, "a", OK, None)
    full.close()


def test_each_result_is_there_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "out"
    output = open_output(str(path), lambda _: None)
    for number in range(3):
        output.write("id", number, "a", OK, None)
        assert len(read(path)) == number + 1
    output.close()
    assert os.path.getsize(path)

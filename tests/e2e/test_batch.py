"""Batches on whole meshes: everything but the model is real, and for one test the model too."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.batch import LLM, Result
from tests.e2e.harness import RunningMesh

SIM: dict[str, Any] = {"device": "simulated", "sim": "base=0.001"}
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    """With a context of 256 tokens, and a cache that holds little more than one of that length."""
    with LLM(
        model_dir, **SIM, max_model_len=256, num_gpu_blocks_override=20, max_num_seqs=8
    ) as llm:
        yield llm


def texts(results: list[Result]) -> list[str | None]:
    return [result.text for result in results]


def test_bad_prompts_are_errors_at_their_places(llm: LLM) -> None:
    """R121"""
    prompts = [f"Number {number}" for number in range(100)]
    params: list[dict[str, Any]] = [dict(GREEDY) for _ in prompts]
    prompts[37] = "word " * 400
    prompts[60] = ""
    params[80]["top_p"] = 7
    results = llm.generate(prompts, params)
    assert [result.prompt for result in results] == prompts
    failed = {at: result.error for at, result in enumerate(results) if result.error}
    assert failed.keys() == {37, 60, 80}
    assert failed[37].code == "context_length_exceeded"
    assert failed[80].param == "top_p"
    assert all(error.status == 400 for error in failed.values())
    assert all(result.usage for result in results if not result.error)
    assert texts(llm.generate(prompts[:3], GREEDY)) == texts(results[:3])


def test_prompts_of_any_length_keep_their_answers(llm: LLM) -> None:
    """R122"""
    drawn = random.Random(3)
    lengths = [drawn.choice((1, 20, 100, 200, 300)) for _ in range(200)]
    prompts = [f"{number}" + " word" * length for number, length in enumerate(lengths)]
    results = llm.generate(prompts, GREEDY)
    assert [result.prompt for result in results] == prompts
    assert [bool(result.error) for result in results] == [length == 300 for length in lengths]
    for at in drawn.sample([at for at, length in enumerate(lengths) if length < 300], 10):
        assert texts(llm.generate(prompts[at], GREEDY)) == [results[at].text]


def test_an_interrupt_and_the_next_call(llm: LLM) -> None:
    """R127"""
    short = ["The mill", "The race"]
    alone = texts(llm.generate(short, GREEDY))
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Long"] * 50, {"max_tokens": 250, "n": 16})  # 200,000 iterations' worth
    assert texts(llm.generate(short, GREEDY)) == alone


def test_each_of_many_with_a_schema_ends_by_its_own_rule(llm: LLM) -> None:
    """R131: in a cache that holds few of them at once."""
    prompts = [f"Number {number}" for number in range(64)]
    params = [
        {**GREEDY, "max_tokens": 40, "guided_json": {"enum": ["x" * (1 + number % 9)]}}
        for number in range(64)
    ]
    together = llm.generate(prompts, params)
    assert [json.loads(result.text or "") for result in together] == [
        "x" * (1 + number % 9) for number in range(64)
    ]
    for at in (0, 31, 63):
        (alone,) = llm.generate(prompts[at], params[at])
        assert alone.text == together[at].text
    free = {**GREEDY, "max_tokens": 12, "guided_regex": "[a-z]{400,}"}
    both = llm.generate(prompts, [free if number % 2 else params[number] for number in range(64)])
    assert [result.finish_reason for result in both] == ["stop", "length"] * 32


def test_no_tokens_is_a_clear_answer(llm: LLM) -> None:
    """R128"""
    (result,) = llm.generate("The mill", {"max_tokens": 0})
    if result.error:
        assert result.error.param == "max_tokens"
    else:
        assert (result.text, result.finish_reason) == ("", "length")


def test_a_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    (alone,) = llm.chat(conversation, GREEDY)
    both = llm.chat([conversation, [{"role": "user", "content": "Bye"}]], GREEDY)
    assert alone.text
    assert alone.text == both[0].text != both[1].text
    assert alone.prompt == conversation


def test_as_from_the_server_itself(mesh: RunningMesh) -> None:
    """With the real model, over TCP."""
    prompts = ["The mill", "Water runs", "The history of"]
    expected = [mesh.text(prompt, max_tokens=6) for prompt in prompts]
    with LLM(url=mesh.url) as llm:
        assert texts(llm.generate(prompts, GREEDY)) == expected
        (samples,) = llm.generate("The mill", {**GREEDY, "n": 3})
        assert samples.texts == [expected[0]] * 3


# --- the command ---------------------------------------------------------------------------------


class Batch:
    """`headrace batch` with a mesh of its own."""

    def __init__(self, model: Path, source: Path, output: Path, scratch: str) -> None:
        flags = ["--model", str(model), "--device", "simulated", "--sim", "base=0.02"]
        self.output = output
        self._before = self._results()
        command = [sys.executable, "-P", "-m", "services.launcher", "batch", str(source)]
        self.process = subprocess.Popen(
            [*command, "-o", str(output), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HEADRACE_API_KEY": "of-another-server", "TMPDIR": scratch},
        )

    def wait_for_results(self) -> list[psutil.Process]:
        """All processes, once there are some new results."""
        while self._results() <= self._before:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return psutil.Process(self.process.pid).children(recursive=True)

    def _results(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def scratch() -> Iterator[str]:
    """For the sockets, as `tmp_path` can be too long for them."""
    with tempfile.TemporaryDirectory(prefix="hr-test-", dir="/tmp") as directory:
        yield directory


def test_a_file_with_all_kinds_of_lines_in_three_runs(
    model_dir: Path, tmp_path: Path, scratch: str
) -> None:
    """R124. Killed in the first, interrupted in the second; the third ends with a result a line."""
    source, output = tmp_path / "in", tmp_path / "out"
    bad: list[dict[str, Any] | str] = [
        line("url", "x", url="/v1/nothing"),
        line("stream", "x", stream=True),
        "{bad",
        "",
        line("7", "a duplicate"),
        line("long", "word " * 10_000),
    ]
    good = [line(str(number), f"Number {number}") for number in range(600)]
    lines = [*good[:300], *bad, *good[300:]]
    source.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))

    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        batch = Batch(model_dir, source, output, scratch)
        processes = batch.wait_for_results()
        assert len(processes) == 6  # the mesh's launcher and services
        assert not [one for one in processes if listens(one)]
        batch.process.send_signal(number)
        assert batch.end()[0] == code
        assert not psutil.wait_procs(processes, timeout=20)[1]
    assert output.read_bytes().endswith(b"\n")

    with output.open("a") as file:
        file.write('{"id": "batch_req_')  # as a kill can leave it
    code, out, err = Batch(model_dir, source, output, scratch).end()
    assert (code, out) == (1, "")
    assert "5 failed" in err
    assert "1 empty lines" in err
    results = [json.loads(one) for one in output.read_text().splitlines()]
    found = [(one["custom_id"], bool(one["error"])) for one in results]
    failed = ["url", "stream", None, "7", "long"]
    expected = [(str(number), False) for number in range(600)] + [(one, True) for one in failed]
    assert sorted(found, key=str) == sorted(expected, key=str)


def line(custom_id: str, prompt: str, url: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 10, **more}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def listens(process: psutil.Process) -> bool:
    """Whether it waits for TCP connections."""
    return any(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))


PROGRAM = """
import sys
from services.batch import LLM
with LLM(sys.argv[1], device="simulated", sim="base=0.001") as llm:
    print([result.text for result in llm.generate(["a", "b", "c"], {"temperature": 0})])
"""


def test_many_start_at_once(model_dir: Path) -> None:
    """R130"""
    command = [sys.executable, "-P", "-c", PROGRAM, str(model_dir)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(answers) == 1
    assert len(json.loads(answers.pop().replace("'", '"'))) == 3

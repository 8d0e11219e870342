"""LLM against a scripted server: orders, errors, interrupts. (A mesh is in tests/e2e.)"""

from __future__ import annotations

import _thread
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from services.batch import LLM, RequestFailed, ServerGone
from tests.services.batch.conftest import ScriptedServer, completion, echo


@pytest.fixture
def llm(server: ScriptedServer) -> Iterator[LLM]:
    with LLM(url=server.url, window=8) as llm:
        yield llm


async def picky(body: dict[str, Any]) -> web.Response:
    if body["prompt"] == "bad":
        error = {"message": "no such thing", "code": "bad_value", "param": "prompt"}
        return web.json_response({"error": error}, status=400)
    return await echo(body)


def test_results_are_in_order_each_with_its_prompt(server: ScriptedServer, llm: LLM) -> None:
    drawn = random.Random(2)

    async def delayed(body: dict[str, Any]) -> web.Response:
        await server.pause(drawn.random() / 100)
        return await echo(body)

    server.act = delayed
    prompts = [f"prompt {number}" for number in range(100)]
    results = llm.generate(prompts)
    assert [result.prompt for result in results] == prompts
    assert [result.text for result in results] == [f"<{prompt}>" for prompt in prompts]
    assert 1 < server.most <= 8


def test_a_failure_stays_at_its_place(server: ScriptedServer, llm: LLM) -> None:
    server.act = picky
    first, second, third = llm.generate(["a", "bad", "b"])
    assert (first.text, third.text) == ("<a>", "<b>")
    assert (second.text, second.texts, second.finish_reason, second.usage) == (None, [], None, None)
    assert second.response is None
    assert second.prompt == "bad"
    error = second.error
    assert error is not None
    assert (str(error), error.status, error.code) == ("no such thing", 400, "bad_value")
    assert error.param == "prompt"


def test_strict_raises_it(server: ScriptedServer, llm: LLM) -> None:
    server.act = picky
    with pytest.raises(RequestFailed, match="no such thing"):
        llm.generate(["a", "bad", "b"], strict=True)
    assert [result.text for result in llm.generate(["a"])] == ["<a>"]


def test_one_prompt_and_parameters(server: ScriptedServer, llm: LLM) -> None:
    assert [result.text for result in llm.generate("alone", {"max_tokens": 7})] == ["<alone>"]
    llm.generate([1, 2, 3])
    llm.generate([[1, 2], [3]], [{"seed": 1}, {"seed": 2}])
    assert server.bodies[:2] == [{"prompt": "alone", "max_tokens": 7}, {"prompt": [1, 2, 3]}]
    assert {"prompt": [3], "seed": 2} in server.bodies


def test_all_samples_in_their_order(server: ScriptedServer, llm: LLM) -> None:
    async def two(body: dict[str, Any]) -> web.Response:
        choices = [{"index": i, "text": f"s{i}", "finish_reason": "length"} for i in (1, 0)]
        return web.json_response({"choices": choices, "usage": {"completion_tokens": 2}})

    server.act = two
    (result,) = llm.generate("x", {"n": 2})
    assert (result.texts, result.text, result.finish_reason) == (["s0", "s1"], "s0", "length")
    assert result.usage == {"completion_tokens": 2}


def test_a_generator_is_read_as_there_is_room(server: ScriptedServer, llm: LLM) -> None:
    read = 0

    def prompts() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield str(read)

    results = llm.generate(prompts())
    assert read == 0
    assert [next(results).text for _ in range(20)] == [f"<{number}>" for number in range(1, 21)]
    assert read <= 20 + 8 * 8
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompts", "params", "kind", "reason"),
    [
        (["x"] * 5, [{}] * 3, ValueError, "3 params for 5 prompts"),
        (["x"] * 3, [{}] * 5, ValueError, "5 params for 3 prompts"),
        (["x"], {"stream": True}, ValueError, "stream cannot be set here"),
        (["x"], [{"prompt": "y"}], ValueError, "prompt cannot be set here"),
        (iter(["x"]), [{}], ValueError, "needs a list of prompts"),
        (["x"], {"seed": object()}, TypeError, "not JSON serializable"),
    ],
)
def test_mistakes_are_raised_before_any_work(
    server: ScriptedServer,
    llm: LLM,
    prompts: Any,
    params: Any,
    kind: type[Exception],
    reason: str,
) -> None:
    """R128"""
    with pytest.raises(kind, match=reason):
        llm.generate(prompts, params)
    assert server.bodies == []


async def test_inside_a_running_loop(server: ScriptedServer) -> None:
    with LLM(url=server.url) as llm:
        assert llm.generate("x")[0].text == "<x>"


def _signal() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("interrupt", [_signal, _thread.interrupt_main])
def test_an_interrupt_aborts_and_the_next_call_works(
    server: ScriptedServer, llm: LLM, interrupt: Callable[[], None]
) -> None:
    async def endless(body: dict[str, Any]) -> web.Response:
        if server.running == 8:
            threading.Thread(target=interrupt).start()
        await server.forever()
        return completion("")

    server.act = endless
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["old"] * 50)
    server.act = echo
    assert [result.text for result in llm.generate(["new", "newer"])] == ["<new>", "<newer>"]
    server.wait_until(lambda: server.left == 8)
    assert len(server.bodies) == 10


def test_leaving_the_loop_early_aborts_the_rest(server: ScriptedServer, llm: LLM) -> None:
    async def act(body: dict[str, Any]) -> web.Response:
        if body["prompt"] != "first":
            await server.forever()
        return await echo(body)

    server.act = act
    for result in llm.generate(iter(["first", *["later"] * 20])):
        server.wait_until(lambda: server.running > 0)
        assert result.text == "<first>"
        break
    server.wait_until(lambda: not server.running)
    assert server.left


def test_what_it_cannot_use(server: ScriptedServer) -> None:
    with pytest.raises(TypeError, match="'dtype' is for a mesh of one's own"):
        LLM(url=server.url, dtype="float32")
    with pytest.raises(TypeError, match="'port' is no flag"):
        LLM(port=80)
    with pytest.raises(ValueError, match="no http address"):
        LLM(url="nowhere")
    with pytest.raises(ServerGone, match="does not answer"):
        LLM(url="http://127.0.0.1:1")
    with pytest.raises(ServerGone, match="401"):
        LLM(url=server.url, api_key="wrong")


def test_a_name_of_the_server(server: ScriptedServer) -> None:
    with LLM("other", url=server.url) as llm:
        llm.generate("x")
    assert server.bodies == [{"model": "other", "prompt": "x"}]
    with pytest.raises(ValueError, match="closed"):
        llm.generate("x")
    llm.close()


def test_the_bar(server: ScriptedServer, llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """R125: it counts prompts, whatever the number of their samples."""
    server.act = picky
    llm.generate(["a", "bad", "b", "c"], {"n": 10}, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "100% 4/4, 1 failed" in err
    llm.generate(["a"])
    assert capfd.readouterr() == ("", "")


def test_it_needs_no_torch() -> None:
    program = (
        "import sys, services.batch, services.batch.command\n"
        "heavy = {'torch', 'transformers', 'triton'} & sys.modules.keys()\n"
        "sys.exit(' '.join(sorted(heavy)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True)

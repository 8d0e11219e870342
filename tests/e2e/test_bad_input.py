"""Whatever cannot be served is refused in OpenAI's shape, and disturbs nobody."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.harness import MODEL, RunningMesh

JSON = {"Content-Type": "application/json"}
ROUTES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


def refused(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The error object of a response that must be a refusal."""
    assert response.status_code in (statuses or (400,)), response.text[:500]
    assert len(response.content) < 10_000
    assert response.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.fixture(autouse=True)
def alive(mesh: RunningMesh) -> Iterator[None]:
    yield
    assert mesh.client.get("/health").status_code == 200
    assert mesh.complete("hi", max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("ids", [[99999999], [-1], ["a"], [[]], [1.5], [True]])
def test_stop_token_ids(mesh: RunningMesh, ids: list[Any]) -> None:
    """R004"""
    body = {"prompt": "hi", "max_tokens": 8, "min_tokens": 4, "stop_token_ids": ids}
    assert "stop_token_ids" in refused(mesh.post("/v1/completions", **body))["param"]


def test_neighbours_are_not_disturbed(mesh: RunningMesh) -> None:
    """R004: greedy texts with bad requests in between are the texts alone."""
    prompts = ["One, two,", "The sea", "A list:", "Once upon"]
    alone = [mesh.text(prompt, max_tokens=20) for prompt in prompts]
    together: dict[str, str] = {}

    def ask(prompt: str) -> None:
        together[prompt] = mesh.text(prompt, max_tokens=20)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for _ in range(20):
        refused(mesh.post("/v1/completions", prompt="hi", stop_token_ids=[99999999]))
        refused(mesh.post("/v1/completions", prompt=[1, 99999999]))
    for thread in threads:
        thread.join()
    assert [together[prompt] for prompt in prompts] == alone


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 99999999],
        [-1],
        [5279552648203111001],
        [1.5],
        [True],
        [[1], []],
        [],
        "",
        None,
        {"a": 1},
        [["a"]],
    ],
)
def test_prompt(mesh: RunningMesh, prompt: Any) -> None:
    """R005"""
    content = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1})
    response = mesh.client.post("/v1/completions", content=content, headers=JSON)
    assert "prompt" in refused(response)["param"]


@pytest.mark.parametrize("text", ["a\\ud800b", "\\udc00", "\\ud83d"])
def test_half_a_character(mesh: RunningMesh, text: str) -> None:
    """A lone surrogate is no text; the body as a whole cannot be read."""
    content = f'{{"model": "{MODEL}", "prompt": "{text}", "max_tokens": 1}}'
    refused(mesh.client.post("/v1/completions", content=content, headers=JSON))


@pytest.mark.parametrize("value", [-1, "5", 1.5, 1e30, True, 0])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_max_tokens(mesh: RunningMesh, path: str, value: Any) -> None:
    """R011: 0 without echo is refused."""
    prompt = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    del prompt["messages" if path == "/v1/completions" else "prompt"]
    assert refused(mesh.post(path, **prompt, max_tokens=value))["param"] == "max_tokens"


def test_max_tokens_may_be_null(mesh: RunningMesh) -> None:
    """R011: it is the default then."""
    assert mesh.post("/v1/completions", prompt="hi", max_tokens=None).status_code == 200


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 1_000_000},
        {"prompt": "hi", "max_tokens": 1_000_000},
        {"prompt": [1] * 24_576},
        {"messages": [{"role": "user", "content": "word " * 24_576}]},
    ],
)
def test_too_long(mesh: RunningMesh, body: dict[str, Any], streaming: bool) -> None:
    """R013: the message has the context length and what was asked."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    error = refused(mesh.post(path, **body, stream=streaming))
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"model": "smol", "prompt": "cut o',
        b'\xff\xfe{"prompt": "x"}',
        b'\xef\xbb\xbf{"model": "smol"}',
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'"x"',
        b"[]",
        b"5",
        b"null",
        b"true",
        b"{}",
    ],
)
def test_bodies(mesh: RunningMesh, path: str, content: bytes) -> None:
    """R016, R017"""
    refused(mesh.client.post(path, content=content, headers=JSON))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_content_type(mesh: RunningMesh, path: str, kind: str | None) -> None:
    """R016"""
    headers = {} if kind is None else {"Content-Type": kind}
    refused(mesh.client.post(path, content=b'{"prompt": "hi"}', headers=headers), 415)


def test_the_input_is_not_repeated(mesh: RunningMesh) -> None:
    """R019"""
    parts = [{"type": "text", "text": 5}] * 5000
    messages = [{"role": "user", "content": parts}]
    refused(mesh.post("/v1/chat/completions", messages=messages))


def test_huge_bodies(mesh: RunningMesh) -> None:
    """R037: refused without being read, with and without a length."""
    before = mesh.child("gateway 0").memory_info().rss
    huge = b'{"prompt": "' + b"a " * 50_000_000 + b'"}'
    refused_or_cut(mesh, huge)

    def chunks() -> Iterator[bytes]:
        for at in range(0, len(huge), 1 << 16):
            yield huge[at : at + (1 << 16)]

    refused_or_cut(mesh, chunks())
    assert mesh.child("gateway 0").memory_info().rss - before < 50 * 1024 * 1024


def refused_or_cut(mesh: RunningMesh, content: bytes | Iterator[bytes]) -> None:
    """A server that stops reading may close before a client that only writes sees the answer."""
    with contextlib.suppress(httpx.WriteError):
        refused(mesh.client.post("/v1/completions", content=content, headers=JSON), 413)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_routes(mesh: RunningMesh, method: str, path: str, status: int) -> None:
    """R020"""
    refused(mesh.client.request(method, path), status)


@pytest.mark.parametrize("path", ROUTES)
def test_wrong_model(mesh: RunningMesh, path: str) -> None:
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "tokens": [1]}
    keep = {"/v1/chat/completions": "messages", "/detokenize": "tokens"}.get(path, "prompt")
    body = {keep: body[keep]}
    error = refused(mesh.client.post(path, json={"model": "other", **body}), 404)
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]


@pytest.mark.parametrize(
    "option",
    [
        {"logprobs": 21},
        {"echo": 1},
        {"logit_bias": {"5": 101}},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0},
        {"best_of": 3, "stream": True},
        {"suffix": "x"},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_p": 2},
        {"n": 0},
        {"n": 1.5},
        {"seed": "a"},
        {"min_tokens": 50, "max_tokens": 5},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_options(mesh: RunningMesh, option: dict[str, Any]) -> None:
    """Values that cannot be served are refused with the field's name."""
    error = refused(mesh.post("/v1/completions", prompt="hi", **option))
    assert error["param"] in option


def test_nan_is_no_number(mesh: RunningMesh) -> None:
    for constant in ("NaN", "Infinity", "-Infinity"):
        content = f'{{"model": "{MODEL}", "prompt": "hi", "temperature": {constant}}}'
        refused(mesh.client.post("/v1/completions", content=content, headers=JSON))


def test_harmless_fields_are_ignored(mesh: RunningMesh) -> None:
    options = {"user": "me", "metadata": {"a": "b"}, "store": True, "no_such_field": 1}
    assert mesh.post("/v1/completions", prompt="hi", max_tokens=1, **options).status_code == 200

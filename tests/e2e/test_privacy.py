"""What clients send, what models answer, and keys: nowhere but where they belong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.harness import MODEL, RunningMesh, running_mesh

MARK = "mArKeR"  # in everything that a client sends, but for names of fields
KEYS = ("sk-mArKeR-own", "sk-mArKeR-file")
SIM = ("--device", "simulated", "--sim", "base=0.002", "--log-level", "debug")


@pytest.fixture(scope="module", params=["json", "console"])
def mesh(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningMesh]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice: {KEYS[1]}\n")
    flags = (*SIM, f"--log-format={request.param}", f"--api-key-file={keys}", "--api-key", KEYS[0])
    with running_mesh(model_dir, *flags, "--trust-request-chat-template") as mesh:
        mesh.client.headers["authorization"] = f"Bearer {KEYS[1]}"
        yield mesh


def schema(title: str) -> dict[str, Any]:
    return {"type": "object", "properties": {title: {"const": title}}, "required": [title]}


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": MARK},
        {"role": "user", "content": f"{MARK} {MARK}", "name": MARK},
    ],
    "max_tokens": 8,
}
TOOL = {"name": MARK, "description": MARK, "parameters": schema(MARK)}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": MARK, "max_tokens": 8, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": MARK, "stop": [MARK], "user": MARK, "max_tokens": 8}),
    ("/v1/completions", {"prompt": MARK, "stop": [MARK], "stream": True, "cache_salt": MARK}),
    ("/v1/completions", {"prompt": MARK, "bad_words": [MARK], "max_tokens": 8}),
    ("/v1/completions", {"prompt": MARK, "logit_bias": {MARK: 1}}),
    ("/v1/completions", {"prompt": MARK, "logit_bias": {"5": MARK}}),
    ("/v1/completions", {"prompt": {MARK: MARK}}),
    ("/v1/completions", {"prompt": MARK, "max_tokens": MARK}),
    ("/v1/completions", {"prompt": MARK * 10_000, "max_tokens": 8}),
    ("/v1/completions", {"prompt": MARK, "guided_regex": f"({MARK}", "max_tokens": 8}),
    ("/v1/completions", {"prompt": MARK, "guided_regex": MARK, "max_tokens": 8}),
    ("/v1/completions", {"prompt": MARK, "guided_grammar": f"root ::= {MARK}", "max_tokens": 8}),
    ("/v1/completions", {"prompt": MARK, "model": MARK}),
    ("/v1/completions", {"prompt": MARK, "metadata": {MARK: MARK}, "max_tokens": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": TOOL}]}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": MARK, "function": {"name": MARK}}]}),
    ("/v1/chat/completions", CHAT | {"tool_choice": MARK}),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": MARK, "schema": schema(MARK)},
            }
        },
    ),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": MARK, "schema": {"type": MARK, "$ref": MARK}},
            }
        },
    ),
    (
        "/v1/chat/completions",
        CHAT | {"chat_template": "{{ raise_exception(messages[0].content) }}"},
    ),
    ("/v1/chat/completions", CHAT | {"chat_template": "{{ " + MARK}),
    ("/v1/chat/completions", {"messages": [{"role": MARK, "content": [{"type": MARK}]}]}),
    ("/v1/messages", {"model": MODEL, "max_tokens": 8, "messages": CHAT["messages"][1:]}),
    ("/v1/responses", {"input": MARK, "max_output_tokens": 16}),
    ("/v1/embeddings", {"input": MARK}),
    ("/tokenize", {"prompt": MARK}),
    ("/detokenize", {"tokens": [MARK]}),
]


def test_nothing_of_requests_answers_and_keys_is_kept(mesh: RunningMesh) -> None:
    """R101: in logs at debug level, metrics, traces and process lists, whatever went wrong."""
    statuses = {mesh.post(path, **body).status_code // 100 for path, body in BODIES}
    assert statuses == {2, 4}
    raw = mesh.client.post("/v1/completions", content=f'{{"prompt": {MARK}', headers=JSON)
    assert raw.status_code == 400
    path = mesh.client.get(f"/v1/models/{MARK}?{MARK}={MARK}")
    assert path.status_code == 404
    wrong = httpx.get(f"{mesh.url}/v1/models", headers={"authorization": f"Bearer {MARK}"})
    assert wrong.status_code == 401
    with mesh.client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        mesh.child("model-executor 0").kill()
        assert list(lines)
    answer = mesh.complete("Say something", max_tokens=12)["choices"][0]["text"]
    assert len(answer.split()) == 12
    for place in ("/metrics", "/trace?seconds=60", "/status", "/openapi.json", "/version"):
        assert MARK not in mesh.client.get(place).text, place
    log = mesh.log.read_text()
    assert "request refused" in log and "debug" in log and "executor lost" in log
    assert not [line for line in log.splitlines() if MARK in line or answer in line]
    launcher = psutil.Process(mesh.process.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        assert not re.search(MARK, " ".join(process.cmdline()))


JSON = {"content-type": "application/json"}
LONG = {"model": MODEL, "prompt": MARK, "max_tokens": 200, "stream": True}

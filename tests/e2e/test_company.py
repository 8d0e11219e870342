"""Requests of all kinds beside each other: each is answered as alone, and as step by step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jsonschema
import pytest

from tests.e2e.harness import MODEL, RunningMesh
from tests.e2e.sse import stream

PLAIN = ["One, two,", "The sea", "A list:"]
PENALIZED: dict[str, Any] = {"frequency_penalty": 2, "repetition_penalty": 1.5, "max_tokens": 8}
REPEATING = ["la la la la", "one two one two", "yes yes yes"]
CHATS = list(range(12))
END = 2  # the model's id for the end of a message
ALWAYS = {"logit_bias": {str(END): 100}}

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def at_once(ask: Callable[[Asked], Answer], asked: list[Asked], most: int = 16) -> list[Answer]:
    """The answers to all, of which up to so many are under way."""
    with ThreadPoolExecutor(most) as pool:
        return list(pool.map(ask, asked))


def drawn_schema(drawn: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "string", "maxLength": 8},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
    ]
    names = drawn.sample(["a", "b", "name", "size", "on"], drawn.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: drawn.choice(kinds) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def test_schemas_beside_free_text(mesh: RunningMesh, step_by_step: RunningMesh) -> None:
    """R061: plans that run ahead change no token of a grammar."""
    drawn = random.Random(61)
    schemas = [drawn_schema(drawn) if number % 3 else None for number in range(15)]

    def answers(server: RunningMesh) -> list[tuple[str, str]]:
        def ask(number: int) -> tuple[str, str]:
            schema = schemas[number]
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"Describe thing {number}."}],
                "max_tokens": 40,
                "temperature": 0,
                "response_format": {"type": "text"} if schema is None else form,
            }
            choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
            return choice["message"]["content"], choice["finish_reason"]

        return at_once(ask, list(range(len(schemas))))

    found = answers(mesh)
    for schema, (text, reason) in zip(schemas, found, strict=True):
        if schema is not None and reason != "length":
            jsonschema.validate(json.loads(text), schema)
    assert sum(reason == "stop" for _, reason in found) > len(found) // 2
    assert answers(step_by_step) == found


def test_penalties_beside_none(mesh: RunningMesh, step_by_step: RunningMesh) -> None:
    """R062: whoever comes first."""

    def ask(prompt: str, server: RunningMesh = mesh) -> str:
        options = PENALIZED if prompt in REPEATING else {"max_tokens": 8}
        return server.text(prompt, **options)

    alone = {prompt: ask(prompt) for prompt in PLAIN + REPEATING}
    assert alone[REPEATING[0]] != mesh.text(REPEATING[0], max_tokens=8)
    for order in (PLAIN + REPEATING, REPEATING + PLAIN):
        for server in (mesh, step_by_step):
            found = at_once(lambda prompt: ask(prompt, server), order)  # noqa: B023
            assert dict(zip(order, found, strict=True)) == alone


def test_conversations_keep_apart(mesh: RunningMesh, step_by_step: RunningMesh) -> None:
    """R065: with beginnings that are nearly the same, interleaved, some of them left."""

    def conversation(number: int, server: RunningMesh = mesh) -> tuple[list[str], int]:
        messages = [{"role": "system", "content": f"You are A{number}, a helpful mill wheel."}]
        cached = 0
        for turn in ("Who are you?", "And who am I?", "Say your name."):
            messages.append({"role": "user", "content": turn})
            body = {"messages": messages, "max_tokens": 4, "temperature": 0}
            if server is mesh and number % 5 == 0 and not cached:
                leaving = {"model": MODEL, **body, "stream": True}
                chat = "/v1/chat/completions"
                with server.client.stream("POST", chat, json=leaving) as left:
                    next(left.iter_lines())
            answer = server.post("/v1/chat/completions", **body).json()
            messages.append(answer["choices"][0]["message"])
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return [message["content"] for message in messages], cached

    found = at_once(conversation, CHATS, 8)
    expected = at_once(lambda number: conversation(number, step_by_step), CHATS, 8)
    assert [said for said, _ in found] == [said for said, _ in expected]
    assert all(cached > 0 for _, cached in found)
    assert not any(cached for _, cached in expected)


def test_counts_are_exact(mesh: RunningMesh) -> None:
    """R079: no token less than `max_tokens`, and none after an end, in text, logprobs or usage."""

    def ask(number: int) -> tuple[dict[str, Any], int]:
        options: dict[str, Any] = {"max_tokens": number, "ignore_eos": True}
        if number > 20:  # it ends at the first token that may be an end
            options = {"max_tokens": 30, "min_tokens": number - 21, **ALWAYS}
        answer = mesh.complete("Count:", logprobs=0, return_token_ids=True, **options)
        return answer["choices"][0], answer["usage"]["completion_tokens"]

    for number, (choice, counted) in enumerate(at_once(ask, list(range(1, 41))), 1):
        ids = choice["token_ids"]
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids) == counted
        assert "<|im_end|>" not in choice["text"]
        if number <= 20:
            assert (choice["finish_reason"], counted) == ("length", number)
        else:
            assert choice["finish_reason"] == "stop"
            assert ids.index(END) == len(ids) - 1 == number - 21


@pytest.mark.parametrize("streaming", [False, True])
def test_grammars_end_where_they_end(mesh: RunningMesh, streaming: bool) -> None:
    """R079: eight that end at eight places."""

    def ask(length: int) -> str:
        options: dict[str, Any] = {"max_tokens": 40, "guided_regex": f"(ab ){{{length}}}"}
        if not streaming:
            return mesh.text("A:", **options)
        return stream(mesh, prompt="A:", temperature=0, **options).text

    assert at_once(ask, list(range(1, 9))) == ["ab " * length for length in range(1, 9)]

"""Answers of a form that the request describes, through the official client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.harness import MODEL, RunningMesh

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK: list[Any] = [{"role": "user", "content": "Describe a person."}]
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(500):
    DEEP = {"type": "array", "items": DEEP}


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def content(client: openai.OpenAI, **options: Any) -> str:
    """The same whole as in a stream."""
    body: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**body | options)
    chunks = client.chat.completions.create(**body | options, stream=True)
    text: str = whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert whole.choices[0].finish_reason == "stop"
    return text


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_a_schema(client: openai.OpenAI) -> None:
    found = json.loads(content(client, response_format=json_schema(SCHEMA)))
    assert found.keys() == {"name", "age"}
    assert isinstance(found["age"], int) and isinstance(found["name"], str)


def test_what_vllm_calls_it(client: openai.OpenAI) -> None:
    assert content(client, extra_body={"guided_choice": ["yes", "no"]}) in ("yes", "no")
    outputs = {"structured_outputs": {"regex": "[a-c]{3}[0-9]{2}"}}
    text = content(client, extra_body=outputs)
    assert len(text) == 5 and set(text[:3]) <= set("abc") and text[3:].isdecimal()


def test_completions_and_logprobs(client: openai.OpenAI) -> None:
    """R028: what the grammar forbids has a finite log-probability."""
    answer = client.completions.create(
        model=MODEL,
        prompt="A number:",
        max_tokens=8,
        logprobs=5,
        extra_body={"guided_regex": "[0-9]{4}"},
    ).model_dump()["choices"][0]
    assert len(answer["text"]) == 4 and answer["text"].isdecimal()
    assert all(value > -1000 for value in answer["logprobs"]["token_logprobs"])


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "xml"},
        {},
        json_schema({"type": "objekt"}),
        json_schema({"$ref": "#/$defs/nowhere"}),
        json_schema({"type": "string", "pattern": "("}),
        json_schema(DEEP),
        json_schema(5),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_forms_that_cannot_be_followed(
    mesh: RunningMesh, form: dict[str, Any], streaming: bool
) -> None:
    """R113"""
    body = {"messages": ASK, "response_format": form, "max_tokens": 5, "stream": streaming}
    response = mesh.post("/v1/chat/completions", **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] in ("response_format", None)
    assert error["message"] and len(response.content) < 10_000


def test_neighbours_are_not_disturbed(mesh: RunningMesh) -> None:
    """R113: greedy texts beside forms of all kinds are the texts alone."""
    prompts = ["One, two,", "The sea", "A list:"]
    alone = [mesh.text(prompt, max_tokens=20) for prompt in prompts]
    together: dict[str, str] = {}

    def ask(prompt: str) -> None:
        together[prompt] = mesh.text(prompt, max_tokens=20)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    many = {"enum": [f"value {number}" for number in range(2000)]}
    for schema in ({"type": "objekt"}, SCHEMA, many, {"type": "array", "items": [SCHEMA]}):
        response = mesh.post(
            "/v1/chat/completions",
            messages=ASK,
            response_format=json_schema(schema),
            max_tokens=5,
        )
        assert response.status_code in (200, 400), response.text
    for thread in threads:
        thread.join()
    assert [together[prompt] for prompt in prompts] == alone

"""The official client's responses: whole, streamed and parsed, with tools and forms of text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.e2e.harness import MODEL, RunningMesh

ASK = "What is the capital of France?"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    cold: bool


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Response:
    """The whole answer, greedy; the stream's must be the same."""
    asked: dict[str, Any] = {"model": MODEL, "input": ASK, "temperature": 0, **fields}
    whole: Response = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
    final = events[-1].response
    assert events[-1].type == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.usage.output_tokens == whole.usage.output_tokens if whole.usage else False
    return whole


def calls_of(response: Response) -> list[tuple[str, Any]]:
    found = [item for item in response.output if item.type == "function_call"]
    return [(item.name, json.loads(item.arguments)) for item in found]


def test_text(client: openai.OpenAI, mesh: RunningMesh) -> None:
    """The same as a chat's."""
    answer = ask(client, instructions="Be brief.", max_output_tokens=12, metadata={"a": "b"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    chat = mesh.post("/v1/chat/completions", messages=messages, max_tokens=12, temperature=0).json()
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert answer.metadata == {"a": "b"}


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = ask(client, max_output_tokens=6)
    assert first.status == "incomplete"
    items = [{"role": "user", "content": ASK}, *[item.to_dict() for item in first.output]]
    second = ask(client, input=[*items, {"role": "user", "content": "Go on."}], max_output_tokens=6)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_sampling_and_logprobs(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.8,
        "extra_body": {"seed": 7, "top_k": 20},
    }
    include = ["message.output_text.logprobs"]
    answer = ask(client, **fields, max_output_tokens=8, top_logprobs=2, include=include)
    (item,) = answer.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    told = item.content[0].logprobs or []
    assert "".join(one.token for one in told) == answer.output_text
    assert all(len(one.top_logprobs) == 2 for one in told)


def test_forced_calls(client: openai.OpenAI) -> None:
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named):
        fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        answer = ask(client, **fields, max_output_tokens=60)
        ((name, arguments),) = calls_of(answer)
        assert name == "get_weather"
        assert arguments["city"] in ("Paris", "Oslo")
    calls = [item.to_dict() for item in answer.output]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
        for call in calls
    ]
    items = [{"role": "user", "content": ASK}, *calls, *results]
    assert ask(
        client, input=items, tools=[TOOL], tool_choice="none", max_output_tokens=5
    ).output_text


def test_forms_of_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Weather of Oslo?", "temperature": 0}
    parsed = client.responses.parse(**asked, text_format=Weather, max_output_tokens=40)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(**asked, text_format=Weather, max_output_tokens=40) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    anything = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=10)
    assert anything.output_text.startswith("{")


def test_refusals(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": ASK}
    with pytest.raises(openai.BadRequestError) as kept:
        client.responses.create(**asked, previous_response_id="resp_1")
    assert kept.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as search:
        client.responses.create(**asked, tools=[{"type": "web_search"}])
    assert search.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(**asked, max_output_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as schema:
        format: Any = {"type": "json_schema", "name": "n", "schema": {"type": "never"}}
        client.responses.create(**asked, text={"format": format})
    assert schema.value.param == "text.format"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")

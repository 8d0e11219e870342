"""R112: tools with the official client and a model that was never trained for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from tests.e2e.harness import MODEL, RunningMesh

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **options: Any) -> ChatCompletion:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 60, **options}
    return cast(ChatCompletion, client.chat.completions.create(model=MODEL, **body))


def stream(client: openai.OpenAI, **options: Any) -> tuple[str, list[list[str]], str | None]:
    """What the chunks add up to: content, [name, arguments] of each call, finish reason."""
    content, calls, reason = "", list[list[str]](), None
    chunks: Any = ask(client, stream=True, **options)
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            if call.id is not None:  # the first of a call, and the only one with its name
                assert (call.index, call.type) == (len(calls), "function")
                calls.append([call.function.name, ""])
            else:
                assert call.function.name is None
            calls[call.index][1] += call.function.arguments
    return content, calls, reason


def calls_of(message: ChatCompletionMessage) -> list[list[str]]:
    calls: Any = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [[call.function.name, call.function.arguments] for call in calls]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls"),
        ({"tool_choice": NAMED}, "stop"),
    ],
    ids=["required", "named"],
)
def test_forced_calls(client: openai.OpenAI, options: dict[str, Any], reason: str) -> None:
    whole = ask(client, tools=[WEATHER, NOW], **options).choices[0]
    assert (whole.finish_reason, whole.message.content) == (reason, None)
    ((name, arguments),) = calls_of(whole.message)
    assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), CITY)
    assert stream(client, tools=[WEATHER, NOW], **options) == ("", [[name, arguments]], reason)


def test_a_forced_call_that_is_cut_off(client: openai.OpenAI) -> None:
    for size in (1, 5, 20):
        options = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": size}
        whole = ask(client, **options).choices[0]
        assert whole.finish_reason == "length"
        assert not whole.message.content
        assert stream(client, **options) == ("", calls_of(whole.message), "length")


def test_free_answers(client: openai.OpenAI) -> None:
    """With tools the model may speak; without them it speaks as if there were none."""
    whole = ask(client, tools=[WEATHER], max_tokens=12).choices[0]
    text, calls, reason = stream(client, tools=[WEATHER], max_tokens=12)
    assert (text or None, calls, reason) == (
        whole.message.content,
        calls_of(whole.message),
        whole.finish_reason,
    )
    none = ask(client, tools=[WEATHER], tool_choice="none", max_tokens=12).choices[0]
    assert none.message.content == ask(client, max_tokens=12).choices[0].message.content
    assert none.message.tool_calls is None


def test_several_calls_in_one_answer(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris, and in Rome?"}]
    options = {"messages": question, "tools": [WEATHER], "tool_choice": "required"}
    whole = ask(client, max_tokens=100, **options).choices[0]
    calls = calls_of(whole.message)
    assert len(calls) > 1
    for _, arguments in calls[:-1]:  # the last one may be cut off
        jsonschema.validate(json.loads(arguments), CITY)
    assert stream(client, max_tokens=100, **options)[1] == calls


def test_calls_and_results_are_told_to_the_model(mesh: RunningMesh, client: openai.OpenAI) -> None:
    calls = ask(client, tools=[WEATHER], tool_choice=NAMED).choices[0].message
    assert calls.tool_calls
    result = {"role": "tool", "tool_call_id": calls.tool_calls[0].id, "content": "20 C"}
    history = [*QUESTION, calls.model_dump(), result]
    told = mesh.post("/tokenize", messages=history, tools=[WEATHER]).json()
    prompt = mesh.post("/detokenize", tokens=told["tokens"]).json()["prompt"]
    assert '"name": "get_weather"' in prompt.split("<tool_call>")[-1]
    assert "<tool_response>\n20 C\n</tool_response>" in prompt
    answer = ask(client, messages=history, tools=[WEATHER], max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == told["count"]


def test_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(client, tool_choice="required")
    broken = {"type": "object", "properties": {"a": {"type": "objekt"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": broken}}
    with pytest.raises(openai.BadRequestError, match="objekt"):
        ask(client, tools=[tool], tool_choice="required")

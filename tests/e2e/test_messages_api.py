"""Anthropic's official client: messages, streams, tools and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types import Message
from pydantic import BaseModel

from tests.e2e.harness import MODEL, RunningMesh

ASK: dict[str, Any] = {"role": "user", "content": "What is the capital of France?"}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    cold: bool


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=mesh.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Message:
    """The whole answer, greedy; the stream's must be the same."""
    asked: dict[str, Any] = {"model": MODEL, "messages": [ASK], "max_tokens": 12, **fields}
    asked["extra_body"] = {"temperature": 0, **asked.get("extra_body", {})}
    whole: Message = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole)
    assert list(map(shown, final.content)) == list(map(shown, whole.content))
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage == whole.usage
    return whole


def shown(block: Any) -> tuple[Any, ...]:
    """What of a block is not drawn."""
    return (
        (block.type, block.text) if block.type == "text" else (block.type, block.name, block.input)
    )


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_text_and_counts(client: anthropic.Anthropic, mesh: RunningMesh) -> None:
    """The same as a chat's."""
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = ask(client, system=system, metadata={"user_id": "me"}, max_tokens=5)
    messages = [{"role": "system", "content": "Be brief."}, ASK]
    chat = mesh.post("/v1/chat/completions", messages=messages, max_tokens=5, temperature=0).json()
    assert text_of(answer) == chat["choices"][0]["message"]["content"]
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert answer.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=[ASK])  # type: ignore[list-item]
    assert counted.input_tokens == answer.usage.input_tokens


def test_why_an_answer_ends(client: anthropic.Anthropic) -> None:
    plain = text_of(ask(client))
    stop = plain.split()[2]
    stopped = ask(client, stop_sequences=["never said", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == plain[: plain.index(stop)]
    ended = ask(client, max_tokens=100)
    assert ended.stop_reason == "end_turn"


def test_sampling(client: anthropic.Anthropic) -> None:
    options = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 5}
    assert text_of(ask(client, extra_body=options)) == text_of(ask(client, extra_body=options))


def test_an_answer_that_the_client_has_begun(client: anthropic.Anthropic) -> None:
    begun = {"role": "assistant", "content": "The capital of France is"}
    answer = ask(client, messages=[ASK, begun], max_tokens=4)
    assert "Paris" in text_of(answer)


def test_forced_calls(client: anthropic.Anthropic) -> None:
    for kind in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        choice: Any = kind | {"disable_parallel_tool_use": True}
        answer = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=60)
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        assert call.type == "tool_use"
        assert call.name == "get_weather"
        assert call.input["city"] in ("Paris", "Oslo")
        call_id = call.id
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "Rain."}
    messages = [
        ASK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    fields: Any = {"messages": messages, "tools": [TOOL], "tool_choice": {"type": "auto"}}
    counted = client.messages.count_tokens(model=MODEL, **fields)
    assert counted.input_tokens == ask(client, **fields, max_tokens=2).usage.input_tokens


def test_forms_of_text(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": [ASK], "max_tokens": 40}
    parsed = client.messages.parse(**asked, output_format=Weather)
    assert isinstance(parsed.parsed_output, Weather)


def test_thinking_is_accepted_by_a_model_without(client: anthropic.Anthropic) -> None:
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}):
        assert text_of(ask(client, thinking=thinking, max_tokens=2))


def test_refusals(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": [ASK], "max_tokens": 5}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(
            **asked | {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}
        )
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**asked | {"max_tokens": 20_000})
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(**asked | {"model": "other"})

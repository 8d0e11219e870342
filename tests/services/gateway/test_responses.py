"""/v1/responses: what is asked becomes a chat, and answers are what the official client expects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.gateway.body import parse
from services.gateway.dialects.responses import ResponsesBody
from services.gateway.errors import ApiError
from services.gateway.parsing.answers import Formats
from services.gateway.parsing.formats import tool_format
from services.gateway.request import Context, GenerationRequest
from shared.messages import Failure, Generate
from shared.types import FinishReason
from tests.services.gateway.details import Spoken, details
from tests.services.gateway.scripted_mesh import MODEL, ScriptedMesh, background, wait_ready

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": CITY}
CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "get_weather",
    "arguments": '{"city": "x"}',
}
CONTEXT = Context("m", 100, 2048, lambda: 1, formats=Formats(tool_format("hermes", "")))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def read(**fields: Any) -> GenerationRequest:
    raw = json.dumps({"input": "hi", **fields}).encode()
    return parse(ResponsesBody, raw).to_request(CONTEXT)


def messages_of(**fields: Any) -> Any:
    (prompt,) = read(**fields).prompts
    return json.loads(prompt.chat or "")["messages"]


def part(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, "text": text}


# --- what is asked


def test_input_becomes_messages() -> None:
    assert messages_of(instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    turn = [
        {"type": "reasoning", "id": "rs", "summary": [], "content": [part("reasoning_text", "hm")]},
        {"type": "message", "role": "assistant", "content": [part("output_text", "So:")]},
        CALL,
        CALL | {"call_id": "c2", "arguments": ""},
    ]
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "20 C"},
        {"type": "function_call_output", "call_id": "c2", "output": [part("input_text", "?")]},
    ]
    user = {"role": "user", "content": [part("input_text", "a"), part("input_text", "b")]}
    function = {"name": "get_weather", "arguments": {"city": "x"}}
    assert messages_of(input=[{"role": "developer", "content": "d"}, user, *turn, *results]) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "So:",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": function | {"arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "20 C"},
        {"role": "tool", "tool_call_id": "c2", "content": "?"},
    ]


def test_what_cannot_be_read_is_passed_over() -> None:
    item = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "secret"}
    assert messages_of(input=[item, {"role": "user", "content": "x"}]) == [
        {"role": "user", "content": "x"}
    ]


def test_parameters() -> None:
    request = read(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=5,
        stop="x",
        top_logprobs=2,
        user="me",
        stream=True,
    )
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.top_k, params.seed, params.stop, params.logprobs) == (3, 5, ["x"], 2)
    assert request.stream
    assert request.tenant
    assert read(include=["message.output_text.logprobs"]).tell.logprobs == 0
    assert read().tell.logprobs is None


def test_a_form_of_the_text() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": CITY, "strict": True}
    grammar = read(text={"format": schema}).params.grammar
    assert grammar is not None
    assert json.loads(grammar.source)["properties"] == CITY["properties"]
    anything = read(text={"format": {"type": "json_object"}}).params.grammar
    assert anything is not None
    assert read(text={"format": {"type": "text"}}).params.grammar is None


def test_tools() -> None:
    request = read(tools=[TOOL])
    assert request.new_parser is not None
    assert request.params.grammar is None
    function = {"name": "get_weather", "parameters": CITY}
    told = json.loads(request.prompts[0].chat or "")["tools"]
    assert told == [{"type": "function", "function": function}]
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        assert read(tools=[TOOL], tool_choice=choice).params.grammar is not None
    assert read(tools=[TOOL], tool_choice="none").new_parser is None
    assert read(tool_choice="auto").new_parser is None


def test_effort_is_for_the_template() -> None:
    (prompt,) = read(reasoning={"effort": "none", "summary": "auto"}).prompts
    chat = json.loads(prompt.chat or "")
    assert (chat["reasoning_effort"], chat["enable_thinking"]) == ("none", False)


@pytest.mark.parametrize(
    ("fields", "param", "naming"),
    [
        ({"input": None}, "input", "input"),
        ({"input": 5}, "input", "text or a list"),
        ({"input": []}, "input", "at least one"),
        ({"input": [5]}, "input", "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "input[0].content[0]: parts of type 'input_image'",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
        ({"input": [CALL | {"arguments": "[]"}]}, "input", "input[0].arguments"),
        ({"input": [CALL | {"call_id": None}]}, "input", "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools", "tools.0.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"input": [{"type": {}, "role": "user", "content": "x"}]}, "input", "input[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity"),
        ({"include": ["everything"]}, "include", "include.0"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens", "min_tokens"),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs"),
        *(
            ({name: value}, name, name)
            for name, value in {
                "previous_response_id": "resp_1",
                "conversation": "conv_1",
                "background": True,
                "prompt": {"id": "p"},
                "truncation": "auto",
                "max_tokens": 5,
                "messages": [],
            }.items()
        ),
    ],
    ids=str,
)
def test_refusals(fields: dict[str, Any], param: str, naming: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    failure = caught.value.failure
    assert (failure.status, failure.param) == (400, param)
    assert naming in failure.message


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_what_cannot_be_repeated_in_an_answer(number: str) -> None:
    body = parse(ResponsesBody, f'{{"input": "x", "metadata": {{"a": {number}}}}}'.encode())
    with pytest.raises(ApiError, match="NaN"):
        body.to_shape(body.to_request(CONTEXT), CONTEXT)


def test_what_asks_for_nothing_is_accepted() -> None:
    neutral = {"background": False, "truncation": "disabled", "store": True, "max_tool_calls": 3}
    read(**neutral, include=["reasoning.encrypted_content"], previous_response_id=None)
    with pytest.raises(ApiError):
        read(**neutral, prompt={})


# --- what is answered


@pytest.fixture
async def official(client: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with _official(str(client.base_url)) as official:
        yield official


def _official(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20)


async def ask(
    official: AsyncOpenAI,
    mesh: ScriptedMesh,
    answer: list[str],
    finish: FinishReason,
    **fields: Any,
) -> Response:
    """The whole answer and the stream's, whose events are checked to be complete and in order."""
    whole: Response = await _answered(
        mesh, answer, finish, official.responses.create(model=MODEL, **fields)
    )
    events = await _answered(mesh, answer, finish, _events(official, **fields))
    for number, event in enumerate(events):
        assert event.sequence_number == number
        EVENT.validate_python(event.model_dump(warnings=False), strict=False)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    Response.model_validate(whole.model_dump(warnings=False))
    assert _same(events[-1].response) == _same(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [_shown(item) for item in done] == [_shown(item) for item in events[-1].response.output]
    return whole


async def _answered(
    mesh: ScriptedMesh, answer: list[str], finish: FinishReason, asking: Any
) -> Any:
    async with background(asking) as task:
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request, prompt_tokens=5)
        offset = 0
        for number, text in enumerate(answer):
            last = number == len(answer) - 1
            token = Spoken(number, text.encode(), offset, 1, [(number, text.encode(), -0.5)])
            told = [details([token], 5 + number, request.request_id)]
            mesh.delta(
                request,
                text,
                finish if last else FinishReason.NONE,
                details=told if request.params.wants_tokens else (),
            )
            offset += len(text)
        async with asyncio.timeout(20):
            return await task


async def _events(official: AsyncOpenAI, **fields: Any) -> list[Any]:
    async with official.responses.stream(model=MODEL, **fields) as stream:
        return [event async for event in stream]


def _same(response: Response) -> dict[str, Any]:
    """Without what is drawn for each answer."""
    drawn = ("id", "created_at", "completed_at")
    known = {name: value for name, value in response.to_dict().items() if name not in drawn}
    output = [_shown(item) for item in response.output]
    for item in output:
        assert item.pop("id").partition("_")[0] in ("msg", "rs", "fc")
        item.pop("call_id", None)
    return known | {"output": output}


def _shown(item: Any) -> dict[str, Any]:
    """As it was sent, without what the client makes of it."""
    known: dict[str, Any] = item.to_dict()
    for one in (known, *known.get("content", ())):
        one.pop("parsed", None)
        one.pop("parsed_arguments", None)
    return known


async def test_text(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    answer = await ask(
        official,
        mesh,
        ["Hello", " there"],
        FinishReason.STOP,
        input="hi",
        instructions="Be brief.",
        metadata={"a": "b"},
        temperature=0.5,
        store=True,
    )
    assert (answer.status, answer.output_text, answer.model) == ("completed", "Hello there", MODEL)
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert (answer.temperature, answer.top_p, answer.error) == (0.5, 1.0, None)
    assert answer.to_dict()["store"] is False
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 2)
    assert answer.usage.total_tokens == 7
    (item,) = answer.output
    assert item.type == "message"
    assert item.status == "completed"


async def test_logprobs(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    answer = await ask(
        official,
        mesh,
        ["a", "b"],
        FinishReason.STOP,
        input="hi",
        include=["message.output_text.logprobs"],
    )
    (item,) = answer.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    assert [one.token for one in item.content[0].logprobs or []] == ["a", "b"]


async def test_a_cut_answer(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    answer = await ask(
        official, mesh, ["Hel"], FinishReason.LENGTH, input="hi", max_output_tokens=1
    )
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert item.type == "message"
    assert item.status == "incomplete"


async def test_an_empty_answer(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    answer = await ask(official, mesh, [""], FinishReason.STOP, input="hi")
    assert answer.output_text == ""
    assert [item.type for item in answer.output] == ["message"]


async def test_calls(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    pieces = ["Let me look.\n", call[:30], call[30:50], call[50:], "\n", call]
    answer = await ask(official, mesh, pieces, FinishReason.STOP, input="hi", tools=[TOOL])
    text, *calls = answer.output
    assert answer.output_text.strip() == "Let me look."
    assert text.type == "message"
    for item in calls:
        assert item.type == "function_call"
        assert (item.name, json.loads(item.arguments)) == ("get_weather", {"city": "Oslo"})
        assert item.call_id.startswith("call_")
    assert len(calls) == 2
    assert answer.tools[0].to_dict()["name"] == "get_weather"


async def test_reasoning(mesh: ScriptedMesh, tiny_model: Path) -> None:
    url = await mesh.start_gateway(tiny_model, reasoning_parser="qwen3")
    await mesh.start_all()
    async with httpx.AsyncClient(base_url=url) as client:
        await wait_ready(client)
    async with _official(url) as official:
        pieces = ["<think>", "Wh", "y", "?", "</think>", "\n\n", "Because", "."]
        answer = await ask(official, mesh, pieces, FinishReason.STOP, input="hi")
        thoughts, text = answer.output
        assert thoughts.type == "reasoning"
        assert [one.text for one in thoughts.content or []] == ["Why?"]
        assert answer.output_text == "Because."
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 6
        assert text.type == "message"
        assert text.content[0].to_dict()["logprobs"] == []


async def test_a_stream_that_fails(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    streaming = official.responses.create(model=MODEL, input="hi", stream=True)
    async with background(streaming) as opening:
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request)
        mesh.delta(request, "x")
        events = []
        async for event in await opening:
            events.append(event)
            if event.type == "response.output_text.delta":
                mesh.fail(request, Failure(500, "it broke"))
    assert events[-1].type == "response.failed"
    response = events[-1].response
    assert (response.status, response.output_text) == ("failed", "x")
    assert response.error is not None
    assert response.error.message == "it broke"


async def test_a_failure_before_a_stream(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    async with background(_events(official, input="hi")) as reading:
        request = await mesh.tokenizer.hear(Generate)
        mesh.fail(request, Failure(400, "messages: too long", "messages", "too_long"))
        with pytest.raises(openai.BadRequestError, match="input: too long") as caught:
            await reading
    assert caught.value.param == "input"

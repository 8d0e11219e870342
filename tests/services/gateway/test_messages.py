"""/v1/messages: what is asked becomes a chat, and answers are what Anthropic's client expects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from services.gateway import generation
from services.gateway.body import parse
from services.gateway.collector import Choice
from services.gateway.dialects.messages import ConversationBody, MessagesBody
from services.gateway.dialects.messages_shape import MessagesShape
from services.gateway.errors import ApiError
from services.gateway.parsing.answers import Formats
from services.gateway.parsing.formats import tool_format
from services.gateway.request import Context, GenerationRequest
from services.gateway.shape import Answer
from shared.messages import Encode, Encoded, Failure, Finished, Generate
from shared.types import FinishReason, RequestId, int32s
from tests.services.gateway.details import Spoken, details
from tests.services.gateway.scripted_mesh import MODEL, ScriptedMesh, background, wait_ready

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "Now.", "input_schema": CITY}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CONTEXT = Context("m", 100, 2048, lambda: 1, formats=Formats(tool_format("hermes", "")))
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def read(**fields: Any) -> GenerationRequest:
    raw = json.dumps({"messages": [USER], "max_tokens": 5, **fields}).encode()
    return parse(MessagesBody, raw).to_request(CONTEXT)


def chat_of(**fields: Any) -> Any:
    (prompt,) = read(**fields).prompts
    return json.loads(prompt.chat or "")


def text(text: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **others}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


# --- what is asked


def test_turns_become_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "x"}}
    chat = chat_of(
        system=[text("Be brief.", **cached), text("Be kind.")],
        messages=[
            USER,
            user(text("a", **cached), text("b")),
            assistant(
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "secret"},
                text("So:"),
                call,
                call | {"id": "t2"},
            ),
            user(
                {"type": "tool_result", "tool_use_id": "t1", "content": "20 C"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [text("?")]},
                {"type": "tool_result", "tool_use_id": "t3", "is_error": True},
                text("Well?"),
            ),
        ],
    )
    function = {"name": "get_weather", "arguments": {"city": "x"}}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "hi\na\nb"},
        {
            "role": "assistant",
            "content": "So:",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": function},
                {"id": "t2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "20 C"},
        {"role": "tool", "tool_call_id": "t2", "content": "?"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "Well?"},
    ]
    assert chat["add_generation_prompt"]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_an_empty_turn(role: str) -> None:
    empty = {"role": role, "content": ""}
    assert chat_of(messages=[{"role": role, "content": []}])["messages"] == [empty]


def test_an_answer_that_the_client_has_begun_goes_on() -> None:
    chat = chat_of(messages=[USER, assistant(text("The answer is"))])
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


def test_parameters() -> None:
    request = read(
        system="s",
        max_tokens=7,
        stop_sequences=["x", "y"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        metadata={"user_id": "me"},
        stream=True,
    )
    params = request.params
    assert (params.max_tokens, params.stop, params.temperature) == (7, ["x", "y"], 0.5)
    assert (params.top_p, params.top_k) == (0.9, 3)
    assert request.stream
    assert request.tenant


def test_tools() -> None:
    function = {"name": "get_weather", "parameters": CITY, "strict": False, "description": "Now."}
    tools = [TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}}]
    assert chat_of(tools=tools)["tools"] == [{"type": "function", "function": function}]
    free = read(tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert free.new_parser is not None
    assert free.params.grammar is None
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        assert read(tools=tools, tool_choice=choice).params.grammar is not None
    none = read(tools=tools, tool_choice={"type": "none"})
    assert none.new_parser is None
    assert "tools" not in json.loads(none.prompts[0].chat or "")


@pytest.mark.parametrize(
    ("thinking", "variable"),
    [("disabled", False), ("enabled", True), ("adaptive", None), (None, None)],
)
def test_thinking_is_for_the_template(thinking: str | None, variable: bool | None) -> None:
    fields = {} if thinking is None else {"thinking": {"type": thinking, "budget_tokens": 1024}}
    chat = chat_of(**fields, output_config={"effort": "low"})
    assert chat.get("enable_thinking") == variable
    assert chat["reasoning_effort"] == "low"


def test_a_form_of_the_text() -> None:
    grammar = read(output_config={"format": {"type": "json_schema", "schema": CITY}}).params.grammar
    assert grammar is not None
    assert json.loads(grammar.source)["properties"] == CITY["properties"]


@pytest.mark.parametrize(
    ("fields", "naming"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "at least one"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [user({"type": "image"})]}, "messages[0].content[0]: blocks of type 'image'"),
        ({"messages": [user({"type": "document"})]}, "'document'"),
        ({"messages": [user({"type": "tool_use"})]}, "'tool_use'"),
        ({"messages": [assistant({"type": "server_tool_use"})]}, "'server_tool_use'"),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "x", "content": [{}]})]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [assistant({"type": "tool_use", "id": "x", "name": "f", "input": {}})]},
            "tool_use is missing",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"container": "c"}, "'container'"),
        ({"mcp_servers": [{}]}, "'mcp_servers'"),
        ({"n": 2}, "'n'"),
    ],
    ids=str,
)
def test_refusals(fields: dict[str, Any], naming: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.failure.status == 400
    assert naming in caught.value.failure.message


def test_what_is_counted_is_what_would_be_asked() -> None:
    fields = {"messages": [USER], "system": "s", "tools": [TOOL]}
    counted = parse(ConversationBody, json.dumps(fields).encode()).to_prompt(CONTEXT)
    assert [counted] == read(**fields).prompts


# --- what is answered


@pytest.fixture
async def official(client: httpx.AsyncClient) -> AsyncIterator[AsyncAnthropic]:
    async with _official(str(client.base_url)) as official:
        yield official


def _official(url: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="any", max_retries=0, timeout=20)


async def ask(
    official: AsyncAnthropic,
    mesh: ScriptedMesh,
    answer: list[str],
    finish: FinishReason = FinishReason.STOP,
    stop_reason: str | None = None,
    **fields: Any,
) -> Message:
    """The whole answer and what the stream adds up to, whose events are checked one by one."""
    asked = {"model": MODEL, "messages": [USER], "max_tokens": 50, **fields}
    creating = official.messages.create(**asked)
    whole: Message = await _answered(mesh, answer, finish, stop_reason, creating)
    events = await _answered(
        mesh, answer, finish, stop_reason, _events(official, {**asked, "stream": True})
    )
    for event in events:
        EVENT.validate_python(event.model_dump(warnings=False))
    assert [events[0].type, events[-2].type, events[-1].type] == [
        *("message_start", "message_delta", "message_stop")
    ]
    assert events[0].message.usage.input_tokens == 5
    final = await _answered(mesh, answer, finish, stop_reason, _final(official, asked))
    Message.model_validate(whole.model_dump(warnings=False))
    assert _same(final) == _same(whole)
    return whole


async def _answered(
    mesh: ScriptedMesh, answer: list[str], finish: FinishReason, stop: str | None, asking: Any
) -> Any:
    async with background(asking) as task:
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request, prompt_tokens=5)
        offset = 0
        for number, piece in enumerate(answer):
            last = number == len(answer) - 1
            token = Spoken(number, piece.encode(), offset, 1, [(number, piece.encode(), -0.5)])
            told = [details([token], 5 + number, request.request_id)]
            mesh.delta(
                request,
                piece,
                finish if last else FinishReason.NONE,
                stop if last else None,
                details=told if request.params.wants_tokens else (),
            )
            offset += len(piece)
        async with asyncio.timeout(20):
            return await task


async def _events(official: AsyncAnthropic, fields: dict[str, Any]) -> list[Any]:
    return [event async for event in await official.messages.create(**fields)]


async def _final(official: AsyncAnthropic, fields: dict[str, Any]) -> Message:
    async with official.messages.stream(**fields) as stream:
        return await stream.get_final_message()


def _same(message: Message) -> dict[str, Any]:
    """Without what is drawn for each answer."""
    known = message.to_dict()
    known.pop("stop_details", None)  # the client's
    assert str(known.pop("id")).startswith("msg_")
    for block in known["content"]:  # type: ignore[attr-defined]
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            assert block.pop("id")
    return known


async def test_text(mesh: ScriptedMesh, official: AsyncAnthropic) -> None:
    answer = await ask(official, mesh, ["Hello", " there"], system="Be brief.")
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == "Hello there"
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert (answer.model, answer.role, answer.type) == (MODEL, "assistant", "message")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 2)


async def test_why_an_answer_ends(mesh: ScriptedMesh, official: AsyncAnthropic) -> None:
    cut = await ask(official, mesh, ["Hel"], FinishReason.LENGTH)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    stopped = await ask(official, mesh, ["Hel"], stop_reason="lo", stop_sequences=["lo"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "lo")
    empty = await ask(official, mesh, [""])
    assert (empty.stop_reason, empty.content) == ("end_turn", [])


async def test_calls(mesh: ScriptedMesh, official: AsyncAnthropic) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    pieces = ["Let me look.\n", call[:30], call[30:50], call[50:], "\n", call]
    answer = await ask(official, mesh, pieces, tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    words, *calls = answer.content
    assert words.type == "text"
    assert words.text.strip() == "Let me look."
    for block in calls:
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("get_weather", {"city": "Oslo"})
    assert len({block.id for block in calls if block.type == "tool_use"}) == 2


async def test_a_call_that_is_cut_off(mesh: ScriptedMesh, official: AsyncAnthropic) -> None:
    begun = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "day": "mon'
    answer = await ask(official, mesh, [begun], FinishReason.LENGTH, tools=[TOOL])
    (block,) = answer.content
    assert block.type == "tool_use"
    assert block.input == {"city": "Oslo"}
    assert answer.stop_reason == "max_tokens"


@pytest.mark.parametrize("arguments", ['{"city": Oslo', '{"city": N', "{"])
def test_a_call_whose_arguments_are_none(arguments: str) -> None:
    begun = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}'
    request = read(tools=[TOOL])
    finished = Finished(RequestId("x"), FinishReason.LENGTH, 3)
    answer = MessagesShape(request).whole([Answer(finished, 5, begun)], [Choice()])
    assert [block.get("input") for block in answer["content"]] == [{}]


async def test_thinking(mesh: ScriptedMesh, tiny_model: Path) -> None:
    url = await mesh.start_gateway(tiny_model, reasoning_parser="qwen3")
    await mesh.start_all()
    async with httpx.AsyncClient(base_url=url) as client:
        await wait_ready(client)
    async with _official(url) as official:
        pieces = ["<think>", "Wh", "y", "?", "</think>", "\n\n", "Because", "."]
        for display, shown in (("summarized", "Why?"), ("omitted", "")):
            thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
            answer = await ask(official, mesh, pieces, thinking=thinking)
            thoughts, words = answer.content
            assert thoughts.type == "thinking"
            assert thoughts.thinking == shown
            assert words.type == "text"
            assert words.text == "Because."
            assert answer.usage.output_tokens_details is not None
            assert answer.usage.output_tokens_details.thinking_tokens == 6


async def test_pings(
    mesh: ScriptedMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the beginning, and while there is nothing to say."""
    monkeypatch.setattr(generation, "KEEP_ALIVE_SECONDS", 0.02)
    asked: list[Generate] = []

    async def pings() -> int:
        heard, body = 0, {"messages": [USER], "max_tokens": 5, "stream": True}
        async with client.stream("POST", "/v1/messages", json=body) as answer:
            async for line in answer.aiter_lines():
                heard += line == "event: ping"
                if line == "event: ping" and heard == 3:
                    mesh.delta(asked[0], "x", FinishReason.STOP)
        return heard

    async with background(pings()) as counting:
        asked.append(await mesh.tokenizer.hear(Generate))
        mesh.accept(asked[0])
        assert await counting >= 3


async def test_a_stream_that_fails(mesh: ScriptedMesh, official: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 5, "stream": True}
    async with background(official.messages.create(**asked)) as opening:
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request)
        mesh.delta(request, "x")
        with pytest.raises(anthropic.APIStatusError, match="it broke") as caught:
            async for event in await opening:
                if event.type == "content_block_delta":
                    mesh.fail(request, Failure(500, "it broke"))
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "it broke"},
    }


async def test_refusals_have_their_classes(mesh: ScriptedMesh, official: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 5}
    with pytest.raises(anthropic.BadRequestError, match="temperature") as bad:
        await official.messages.create(**asked, extra_body={"temperature": 9})
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="wrong"):
        await official.messages.create(**{**asked, "model": "wrong"})


async def test_counting(mesh: ScriptedMesh, official: AsyncAnthropic) -> None:
    counting = official.messages.count_tokens(model=MODEL, messages=[USER], tools=[TOOL])  # type: ignore[list-item]
    async with background(counting) as answering:
        question = await mesh.tokenizer.hear(Encode)
        mesh.tokenizer.tell(Encoded(question.request_id, int32s([5, 6, 7]), 256))
        assert (await answering).input_tokens == 3
    assert "get_weather" in (question.prompt.chat or "")


async def test_keys(mesh: ScriptedMesh, tiny_model: Path) -> None:
    """As Anthropic's clients send them; whoever sends another one beside is not let in by that."""
    url = await mesh.start_gateway(tiny_model, api_key=["secret"])
    good, wrong = {"x-api-key": "secret"}, {"authorization": "Bearer no"}
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/models", headers=good)).status_code == 200
        for headers in ({"x-api-key": "no"}, {"x-api-key": ""}, good | wrong):
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        twice = [("x-api-key", "secret"), ("x-api-key", "secret")]
        assert (await client.get("/v1/models", headers=twice)).status_code == 401
        refused = await client.post("/v1/messages", json={})
        assert refused.json()["error"]["type"] == "authentication_error"

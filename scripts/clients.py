"""What scripts/check_clients runs: each check prints what came; the first that fails ends it.

    python scripts/clients.py URL MODEL KEY

MODEL "" is the first that the server names.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal

import litellm
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ASK = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": ASK}]
TOKENS = 24
CALL_TOKENS = 80

litellm.suppress_debug_info = True


@tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


class Answer(BaseModel):
    """An answer."""

    city: Literal["Paris", "Oslo", "London"]
    sure: bool


def main(url: str, model: str, key: str) -> None:
    name = model or _first_model(url, key)
    openai: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": key, "model": name}
    chats = {
        "ChatOpenAI": ChatOpenAI(**openai, temperature=0, max_tokens=CALL_TOKENS),
        "ChatOpenAI with responses": ChatOpenAI(
            **openai, temperature=0, max_tokens=CALL_TOKENS, use_responses_api=True
        ),
        "ChatAnthropic": ChatAnthropic(
            base_url=url, api_key=key, model=name, max_tokens=CALL_TOKENS
        ),
    }
    for title, chat in chats.items():
        for what, check in langchain_checks(chat):
            report(f"{title}: {what}", check)
    for what, check in litellm_checks(url, name, key):
        report(f"litellm: {what}", check)


def report(what: str, check: Callable[[], Any]) -> None:
    print(f"{what:45} {check()!r}"[:200], flush=True)


def langchain_checks(chat: BaseChatModel) -> Iterator[tuple[str, Callable[[], Any]]]:
    def stream() -> str:
        chunks = list(chat.stream(ASK))
        assert len(chunks) > 2
        return "".join(chunk.text for chunk in chunks)

    def tools(forced: BaseChatModel) -> Any:
        asked = forced.invoke(ASK)
        assert asked.tool_calls, asked
        return asked

    def called() -> Any:
        return tools(chat.bind_tools([get_weather], tool_choice="any")).tool_calls

    def streamed_call() -> Any:
        whole = None
        for chunk in chat.bind_tools([get_weather], tool_choice="get_weather").stream(ASK):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert whole.tool_calls
        return whole.tool_calls

    def goes_on() -> str:
        asked = tools(chat.bind_tools([get_weather], tool_choice="any"))
        results = [
            ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
            for call in asked.tool_calls
        ]
        history = [HumanMessage(ASK), asked, *results]
        return str(chat.bind_tools([get_weather]).invoke(history).text)

    def structured(**options: Any) -> Any:
        answer = chat.with_structured_output(Answer, **options).invoke(ASK)
        assert isinstance(answer, Answer)
        return answer

    yield "invoke", lambda: _text(chat.invoke(ASK))
    yield "usage", lambda: chat.invoke(ASK).usage_metadata
    yield "stream", stream
    yield "a tool", called
    yield "a tool, streamed", streamed_call
    yield "a tool's result", goes_on
    yield "structured output", structured
    yield "structured output by a tool", lambda: structured(method="function_calling")


def litellm_checks(url: str, model: str, key: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
        asked: dict[str, Any] = {
            "model": f"{provider}/{model}",
            "api_base": base,
            "api_key": key,
            "messages": MESSAGES,
            "max_tokens": TOKENS,
        }

        def whole(asked: dict[str, Any] = asked) -> str:
            answer = litellm.completion(**asked)
            assert answer.usage.completion_tokens
            return str(answer.choices[0].message.content)

        def stream(asked: dict[str, Any] = asked) -> str:
            chunks = list(litellm.completion(**asked, stream=True))
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        def call(asked: dict[str, Any] = asked) -> Any:
            function = {
                "name": "get_weather",
                "parameters": get_weather.args_schema.model_json_schema(),
            }
            tools = [{"type": "function", "function": function}]
            answer = litellm.completion(
                **asked | {"max_tokens": CALL_TOKENS}, tools=tools, tool_choice="required"
            )
            (made,) = answer.choices[0].message.tool_calls[:1]
            return made.function.name, json.loads(made.function.arguments)

        yield f"{provider} completion", whole
        yield f"{provider} completion, streamed", stream
        yield f"{provider} completion with a tool", call


def _text(message: Any) -> str:
    assert message.text, message
    return str(message.text)


def _first_model(url: str, key: str) -> str:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name


if __name__ == "__main__":
    main(*sys.argv[1:])

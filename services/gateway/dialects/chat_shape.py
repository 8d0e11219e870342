"""How answers to chats are written: messages, and deltas of them."""

from __future__ import annotations

from typing import Any

from services.gateway.collector import Change, Choice
from services.gateway.logprobs import as_text, chat_logprobs
from services.gateway.output import (
    Content,
    OutputParser,
    Part,
    Reasoning,
    ToolArguments,
    ToolCall,
)
from services.gateway.parsing.part_parser import merged
from services.gateway.request import GenerationRequest
from services.gateway.shape import Answer, ChoiceShape, quote
from services.gateway.telling import Told
from shared.messages import Finished
from shared.types import FinishReason

NOTHING = '"delta":{}'


class ChatShape(ChoiceShape):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request: GenerationRequest,
        *,
        echoed: str = "",
        show_reasoning: bool = True,
        called: str = "tool_calls",
    ) -> None:
        """`echoed` comes before the answer's text; `called` is how answers with calls finish."""
        super().__init__(request, chat_logprobs, as_text)
        self._echoed = echoed
        self._show_reasoning = show_reasoning
        self._called = called
        self._calling: set[int] = set()  # choices with calls
        self._parsers: list[OutputParser] = []  # of the choices; none if all is content
        if request.new_parser is not None:
            self._parsers = [request.new_parser() for _ in range(request.size)]

    def opening(self, choices: list[Choice]) -> bytes:
        deltas = ['{"role":"assistant","content":""}']
        if self._echoed:
            deltas.append(f'{{"content":{quote(self._echoed)}}}')
        return b"".join(
            self._bare_event(index, f'"delta":{delta}', choices)
            for index in range(len(choices))
            for delta in deltas
        )

    def event(self, change: Change, choices: list[Choice]) -> bytes:
        if not self._parsers:
            return super().event(change, choices)
        *first, last = self._deltas(change) or [NOTHING]
        if last is NOTHING and not change.spans and change.finished is None:
            return b""
        earlier = [self._bare_event(change.index, delta, choices) for delta in first]
        return b"".join([*earlier, self._event(change, last, choices)])

    def whole(self, answers: list[Answer], choices: list[Choice]) -> dict[str, Any]:
        written = super().whole(answers, choices)
        for choice in written["choices"]:
            if "tool_calls" in choice["message"] and choice["finish_reason"] == "stop":
                choice["finish_reason"] = self._called
        return written

    def _deltas(self, change: Change) -> list[str]:
        parser = self._parsers[change.index]
        parts = parser.feed(change.text)
        if change.finished is not None:
            parts = merged(parts + parser.flush())
        return [delta for part in parts if (delta := self._delta(change.index, part))]

    def _delta(self, choice: int, part: Part) -> str:
        match part:
            case Content(text):
                return self._chunk_content(quote(text))
            case Reasoning(text):
                return f'"delta":{{"reasoning_content":{quote(text)}}}' * self._show_reasoning
            case ToolCall(index, id, name):
                self._calling.add(choice)
                call = (
                    f'"index":{index},"id":{quote(id)},"type":"function",'
                    f'"function":{{"name":{quote(name)},"arguments":""}}'
                )
            case ToolArguments(index, text):
                call = f'"index":{index},"function":{{"arguments":{quote(text)}}}'
        return f'"delta":{{"tool_calls":[{{{call}}}]}}'

    def _finish_reason(self, index: int, finished: Finished) -> str:
        if finished.reason == FinishReason.STOP and index in self._calling:
            return self._called
        return super()._finish_reason(index, finished)

    def _content(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        new_parser = self._request.new_parser
        if new_parser is not None:
            parser = new_parser()
            message |= self._fields(merged(parser.feed(text) + parser.flush()))
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        return {"message": message}

    def _fields(self, parts: list[Part]) -> dict[str, Any]:
        """What the deltas of a stream would add up to."""
        content, reasoning, calls = "", "", list[dict[str, Any]]()
        for part in parts:
            match part:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case ToolCall(_, id, name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": id, "type": "function", "function": function})
                case ToolArguments(index, text):
                    calls[index]["function"]["arguments"] += text
        fields: dict[str, Any] = {"content": content or None if calls or reasoning else content}
        if reasoning and self._show_reasoning:
            fields["reasoning_content"] = reasoning
        return fields | ({"tool_calls": calls} if calls else {})

    def _chunk_content(self, text: str) -> str:
        return f'"delta":{{"content":{text}}}' if text != '""' else NOTHING

    def _place_told(self, told: Told) -> tuple[dict[str, Any], dict[str, Any]]:
        return told.in_choice, told.of_prompt

"""The shapes of answers: whole, and as server-sent events.

Events are put together from prepared parts: this is the one place that runs for every token of
every stream.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from json.encoder import encode_basestring
from typing import Any

from services.gateway.collector import Choice
from services.gateway.errors import error_body
from services.gateway.flight import new_request_id
from services.gateway.protocol import GenerationRequest
from shared.messages import Failure, Finished
from shared.types import FinishReason

DONE = b"data: [DONE]\n\n"
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
# Line ends for many clients' readers, though not for JSON nor for the standard of events.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def dump(content: Any) -> str:
    """JSON that holds no line end of any kind."""
    return _one_line(
        json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    )


def quote(text: str) -> str:
    """`dump` for a text, quicker."""
    return _one_line(encode_basestring(text))


def _one_line(content: str) -> str:
    return content if content.isascii() else content.translate(LINE_ENDS)


def error_event(failure: Failure) -> bytes:
    return f"data: {dump(error_body(failure))}\n\n".encode()


def usage_of(request: GenerationRequest, choices: list[Choice]) -> dict[str, Any]:
    """A prompt counts once, whatever the number of its samples."""
    firsts = choices[:: request.n]
    prompt = sum(choice.prompt_tokens for choice in firsts)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in firsts)},
    }


class Shape(ABC):
    """How one answer is written; all its parts bear the same id, time and model."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, request: GenerationRequest) -> None:
        self.id = f"{self.id_prefix}-{new_request_id()}"
        self._head = {"id": self.id, "created": int(time.time()), "model": request.model}
        head = dump({"object": self.chunk_object, **self._head})[:-1]
        self._start = f'data: {head},"choices":['
        # With include_usage all chunks but the last say that they have none, as OpenAI's do.
        self._end = '],"usage":null}\n\n' if request.include_usage else "]}\n\n"

    def opening_event(self, index: int) -> bytes:
        """What comes before the first text of a choice."""
        return b""

    def text_event(self, index: int, text: str) -> bytes:
        choice = self._choice(index, quote(text), "null")
        return f"{self._start}{choice}{self._end}".encode()

    def last_event(self, index: int, text: str, finished: Finished) -> bytes:
        reason = f'"{FINISH_REASONS[finished.reason]}"'
        choice = self._choice(index, quote(text), reason, dump(finished.stop_reason))
        return f"{self._start}{choice}{self._end}".encode()

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return f'{self._start}],"usage":{dump(usage)}}}\n\n'.encode()

    def whole(
        self, texts: list[str], finishes: list[Finished], usage: dict[str, Any]
    ) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._content(text),
                "logprobs": None,
                "finish_reason": FINISH_REASONS[finished.reason],
                "stop_reason": finished.stop_reason,
            }
            for index, (text, finished) in enumerate(zip(texts, finishes, strict=True))
        ]
        return {"object": self.whole_object, **self._head, "choices": choices, "usage": usage}

    def _choice(self, index: int, text: str, reason: str, stop_reason: str = "null") -> str:
        """JSON of one choice of a chunk; all but the index are JSON already."""
        return (
            f'{{"index":{index},{self._chunk_content(text)},"logprobs":null,'
            f'"finish_reason":{reason},"stop_reason":{stop_reason}}}'
        )

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_content(self, text: str) -> str: ...


class CompletionShape(Shape):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _chunk_content(self, text: str) -> str:
        return f'"text":{text}'


class ChatShape(Shape):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening_event(self, index: int) -> bytes:
        choice = (
            f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            '"finish_reason":null,"stop_reason":null}'
        )
        return f"{self._start}{choice}{self._end}".encode()

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _chunk_content(self, text: str) -> str:
        return f'"delta":{{"content":{text}}}' if text != '""' else '"delta":{}'

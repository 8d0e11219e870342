"""The shapes of answers: whole, and as server-sent events.

Events are put together from prepared parts: this is the one place that runs for every token of
every stream.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, ClassVar

from services.gateway.collector import Change, Choice
from services.gateway.errors import error_body
from services.gateway.flight import new_request_id
from services.gateway.logprobs import Name
from services.gateway.request import GenerationRequest
from services.gateway.telling import Form, Teller, Told
from services.gateway.tokens import Token
from shared.messages import Failure, Finished
from shared.types import FinishReason

DONE = b"data: [DONE]\n\n"
BARE_END = ',"logprobs":null,"finish_reason":null,"stop_reason":null}'
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


def named_event(name: str, content: Any) -> bytes:
    """A server-sent event with its name."""
    return f"event: {name}\ndata: {dump(content)}\n\n".encode()


def usage_of(request: GenerationRequest, choices: list[Choice]) -> dict[str, Any]:
    """A prompt counts once, whatever the number of its samples."""
    firsts = choices[:: request.samples]
    prompt = sum(choice.prompt_tokens for choice in firsts)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in firsts)},
    }


@dataclass(slots=True)
class Answer:
    """All of one choice."""

    finished: Finished
    prompt_tokens: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)  # if they were asked for


class Shape(ABC):
    """How one answer is written; lives as long as the request.

    The choices are those of the collector: what is known of each when a method is called.
    """

    id: str  # of the answer

    @abstractmethod
    def whole(self, answers: list[Answer], choices: list[Choice]) -> dict[str, Any]:
        """The answer that is no stream."""


class StreamShape(Shape):
    """A stream is `opening`, an `event` for each change, and `closing`, or `failed` at any time."""

    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"  # a comment: clients skip it
    opens_early: ClassVar[bool] = True  # before there is any text

    @abstractmethod
    def opening(self, choices: list[Choice]) -> bytes:
        """What comes before the first text, once the prompts' tokens are counted."""

    @abstractmethod
    def event(self, change: Change, choices: list[Choice]) -> bytes: ...

    @abstractmethod
    def closing(self, choices: list[Choice]) -> bytes: ...

    @abstractmethod
    def failed(self, failure: Failure) -> bytes: ...


class ChoiceShape(StreamShape):
    """What OpenAI's completions and chat completions share: numbered choices with deltas."""

    opens_early = False  # clients take the time of the first chunk for that of the first token

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, request: GenerationRequest, form: Form, name: Name) -> None:
        """`form` is that of a `logprobs` object, with tokens named by `name`."""
        self.id = f"{self.id_prefix}-{request.request_id or new_request_id()}"
        self._request = request
        self._teller = Teller(request.tell, form, name)
        self._head = {"id": self.id, "created": int(time.time()), "model": request.model}
        head = dump({"object": self.chunk_object, **self._head})[:-1]
        self._start = f'data: {head},"choices":['
        # With include_usage all chunks but the last say that they have none, as OpenAI's do.
        self._end = '],"usage":null}\n\n' if request.include_usage else "]}\n\n"
        self._bare_end = BARE_END + self._end

    def opening(self, choices: list[Choice]) -> bytes:
        return b""

    def event(self, change: Change, choices: list[Choice]) -> bytes:
        content = self._chunk_content(quote(change.text))
        if change.finished is None and not change.spans:
            return self._bare_event(change.index, content, choices)
        return self._event(change, content, choices)

    def _bare_event(self, index: int, content: str, choices: list[Choice]) -> bytes:
        """A chunk with nothing but content: so are nearly all."""
        end = self._bare_end
        if self._request.continuous_usage:
            end = BARE_END + self._with_usage(choices)
        return f'{self._start}{{"index":{index},{content}{end}'.encode()

    def _event(self, change: Change, content: str, choices: list[Choice]) -> bytes:
        """The chunk that tells of a change, with this content."""
        finished = change.finished
        if finished is None:
            reason = stop_reason = "null"
        else:
            reason = f'"{self._finish_reason(change.index, finished)}"'
            stop_reason = dump(finished.stop_reason)
        told = Told()
        if change.spans:
            told = self._teller.told(change.tokens, choices[change.index].prompt_tokens)
        of_choice, beside = self._place_told(told)
        logprobs = "null" if told.logprobs is None else dump(told.logprobs)
        end = self._with_usage(choices) if self._request.continuous_usage else self._end
        return (
            f'{self._start}{{"index":{change.index},{content},"logprobs":{logprobs},'
            f'"finish_reason":{reason},"stop_reason":{stop_reason}{_more(of_choice)}}}]'
            f"{_more(beside)}{end[1:]}"
        ).encode()

    def closing(self, choices: list[Choice]) -> bytes:
        if not self._request.include_usage:
            return DONE
        return f"{self._start}{self._with_usage(choices)}".encode() + DONE

    def failed(self, failure: Failure) -> bytes:
        return f"data: {dump(error_body(failure))}\n\n".encode()

    def whole(self, answers: list[Answer], choices: list[Choice]) -> dict[str, Any]:
        written: list[dict[str, Any]] = []
        beside: dict[str, Any] = {}
        for index, answer in enumerate(answers):
            told = self._teller.told(answer.tokens, answer.prompt_tokens)
            of_choice, beside = self._place_told(told)
            written.append(
                {
                    "index": index,
                    **self._content(answer.text),
                    "logprobs": told.logprobs,
                    "finish_reason": FINISH_REASONS[answer.finished.reason],
                    "stop_reason": answer.finished.stop_reason,
                    **of_choice,
                }
            )
        usage = usage_of(self._request, choices)
        head = {"object": self.whole_object, **self._head}
        return {**head, "choices": written, "usage": usage, **beside}

    def _with_usage(self, choices: list[Choice]) -> str:
        """The end of a chunk, with what the request has used so far."""
        return f'],"usage":{dump(usage_of(self._request, choices))}}}\n\n'

    def _finish_reason(self, index: int, finished: Finished) -> str:
        return FINISH_REASONS[finished.reason]

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_content(self, text: str) -> str: ...

    @abstractmethod
    def _place_told(self, told: Told) -> tuple[dict[str, Any], dict[str, Any]]:
        """Further fields of the choice, and those beside the choices."""


def _more(fields: dict[str, Any]) -> str:
    """Fields of an object after others, as JSON."""
    return f",{dump(fields)[1:-1]}" if fields else ""

"""How answers of /v1/messages are written: a message with its blocks, and the events of it."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic_core import from_json

from services.gateway.blocks import Begun, Block, BlockKind, BlockReader, Ended, Grown, Step
from services.gateway.collector import Change, Choice
from services.gateway.errors import error_body_at
from services.gateway.flight import new_request_id
from services.gateway.output import PlainParser
from services.gateway.request import GenerationRequest
from services.gateway.shape import Answer, StreamShape, named_event, usage_of
from shared.messages import Failure, Finished
from shared.types import FinishReason

PATH = "/v1/messages"
# Kind of block -> type of its deltas, and the key that holds their text
DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.THOUGHT: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
PING = named_event("ping", {"type": "ping"})


class MessagesShape(StreamShape):
    keep_alive: ClassVar[bytes] = PING

    def __init__(self, request: GenerationRequest, *, show_thoughts: bool = True) -> None:
        """Thoughts that are not to be shown are blocks without text."""
        self.id = f"msg_{request.request_id or new_request_id()}"
        self._request = request
        self._show_thoughts = show_thoughts
        self._reader = BlockReader(request.new_parser() if request.new_parser else PlainParser())

    def opening(self, choices: list[Choice]) -> bytes:
        message = self._message([], None, choices)
        return named_event("message_start", {"type": "message_start", "message": message}) + PING

    def event(self, change: Change, choices: list[Choice]) -> bytes:
        steps = self._reader.feed(change.text, change.tokens)
        if change.finished is not None:
            steps += self._reader.end()
        return b"".join(map(self._of_step, steps))

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        delta = self._stop(choice.finished)
        content = {"type": "message_delta", "delta": delta, "usage": self._usage(choices)}
        end = named_event("message_stop", {"type": "message_stop"})
        return named_event("message_delta", content) + end

    def failed(self, failure: Failure) -> bytes:
        return named_event("error", error_body_at(PATH, failure))

    def whole(self, answers: list[Answer], choices: list[Choice]) -> dict[str, Any]:
        (answer,) = answers
        blocks = self._reader.read(answer.text, answer.tokens)
        return self._message(list(map(self._block, blocks)), answer.finished, choices)

    def _message(
        self, content: list[Any], finished: Finished | None, choices: list[Choice]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            **self._stop(finished),
            "usage": self._usage(choices),
        }

    def _stop(self, finished: Finished | None) -> dict[str, Any]:
        """Why the answer ended; all null while it has not."""
        if finished is None:
            return {"stop_reason": None, "stop_sequence": None}
        if finished.reason == FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(finished.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_reason}
        called = any(block.kind is BlockKind.CALL for block in self._reader.blocks)
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _usage(self, choices: list[Choice]) -> dict[str, Any]:
        """All of the prompt is input, whether or not its beginning was cached."""
        usage = usage_of(self._request, choices)
        return {
            "input_tokens": usage["prompt_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._reader.thought_tokens},
        }

    def _block(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "text", "text": block.text, "citations": None}
            case BlockKind.THOUGHT:
                shown = block.text if self._show_thoughts else ""
                return {"type": "thinking", "thinking": shown, "signature": ""}
        input = _input(block.text)
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": input}

    def _of_step(self, step: Step) -> bytes:
        match step:
            case Begun(block):
                empty = Block(block.index, block.kind, block.id, block.name)
                content: dict[str, Any] = {"content_block": self._block(empty)}
                kind = "content_block_start"
            case Grown(block, text):
                hidden = block.kind is BlockKind.THOUGHT and not self._show_thoughts
                if hidden or not text:
                    return b""
                delta, key = DELTAS[block.kind]
                content = {"delta": {"type": delta, key: text}}
                kind = "content_block_delta"
            case Ended(block):
                content, kind = {}, "content_block_stop"
        return named_event(kind, {"type": kind, "index": block.index, **content})


def _input(arguments: str) -> Any:
    """As much as there is of it, if it was cut off; the official client reads streams like this."""
    try:
        return from_json(arguments, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}

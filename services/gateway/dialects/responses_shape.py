"""How answers of /v1/responses are written: a response with its items, and the events of it."""

from __future__ import annotations

import time
from typing import Any

from services.gateway.blocks import Begun, Block, BlockKind, BlockReader, Ended, Grown, Step
from services.gateway.collector import Change, Choice
from services.gateway.errors import MAX_MESSAGE_CHARS
from services.gateway.flight import new_request_id
from services.gateway.logprobs import as_text, chat_logprobs
from services.gateway.output import PlainParser
from services.gateway.request import GenerationRequest
from services.gateway.shape import Answer, StreamShape, named_event, usage_of
from services.gateway.tokens import Token
from shared.messages import Failure, Finished
from shared.types import FinishReason

ID_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.THOUGHT: "rs", BlockKind.CALL: "fc"}
EVENTS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.THOUGHT: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}
ERROR_CODE = "server_error"  # what comes in a stream is never the client's fault


class ResponsesShape(StreamShape):
    def __init__(self, request: GenerationRequest, echoed: dict[str, Any]) -> None:
        """`echoed`: fields of the response that repeat the request's."""
        self.id = f"resp_{request.request_id or new_request_id()}"
        self._request = request
        self._logprobs = request.tell.logprobs  # alternatives
        self._reader = BlockReader(request.new_parser() if request.new_parser else PlainParser())
        self._ids: dict[int, str] = {}  # of the items
        self._cut = False  # the last item
        self._number = 0  # of the next event
        self._head = {"id": self.id, "object": "response", "created_at": int(time.time())}
        self._echoed = echoed

    def opening(self, choices: list[Choice]) -> bytes:
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def event(self, change: Change, choices: list[Choice]) -> bytes:
        steps = self._reader.feed(change.text, change.tokens)
        if change.finished is not None:
            steps += self._reader.end(never_empty=True)
            self._cut = _cut_off(change.finished)
        return b"".join(map(self._of_step, steps))

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        assert choice.finished is not None
        response = self._final(choice.finished, choices)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, failure: Failure) -> bytes:
        self._cut = True
        error = {"code": ERROR_CODE, "message": failure.message[:MAX_MESSAGE_CHARS]}
        response = self._response("failed", self._items(), error=error)
        return self._event("response.failed", response=response)

    def whole(self, answers: list[Answer], choices: list[Choice]) -> dict[str, Any]:
        (answer,) = answers
        self._reader.read(answer.text, answer.tokens, never_empty=True)
        self._cut = _cut_off(answer.finished)
        return self._final(answer.finished, choices)

    # --- the response

    def _final(self, finished: Finished, choices: list[Choice]) -> dict[str, Any]:
        usage = self._usage(choices)
        if _cut_off(finished):
            details = {"reason": "max_output_tokens"}
            return self._response(
                "incomplete", self._items(), usage=usage, incomplete_details=details
            )
        now = int(time.time())
        return self._response("completed", self._items(), usage=usage, completed_at=now)

    def _response(self, status: str, output: list[Any], **others: Any) -> dict[str, Any]:
        absent = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        known = {**self._head, "status": status, "output": output, **absent, **others}
        return {**known, **self._echoed}

    def _usage(self, choices: list[Choice]) -> dict[str, Any]:
        usage = usage_of(self._request, choices)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.thought_tokens},
            "total_tokens": usage["total_tokens"],
        }

    # --- its items

    def _items(self) -> list[dict[str, Any]]:
        return [self._item(block, self._status(block)) for block in self._reader.blocks]

    def _status(self, block: Block) -> str:
        """Of an item that has ended."""
        last = block is self._reader.blocks[-1]
        return "incomplete" if last and self._cut else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        content = [self._part(block)] if status != "in_progress" else []
        item = {"id": self._id(block), "status": status}
        match block.kind:
            case BlockKind.TEXT:
                return item | {"type": "message", "role": "assistant", "content": content}
            case BlockKind.THOUGHT:
                kept = {"summary": [], "content": content, "encrypted_content": None}
                return item | {"type": "reasoning", **kept}
        call = {"type": "function_call", "call_id": block.id, "name": block.name}
        return item | call | {"arguments": "" if status == "in_progress" else block.text}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind is not BlockKind.TEXT:
            return {"type": "reasoning_text", "text": block.text}
        told = {"annotations": [], "logprobs": self._told(block.tokens)}
        return {"type": "output_text", "text": block.text, **told}

    def _told(self, tokens: list[Token]) -> list[Any]:
        if self._logprobs is None:
            return []
        content: list[Any] = chat_logprobs(tokens, self._logprobs, as_text)["content"]
        return content

    def _id(self, block: Block) -> str:
        if block.index not in self._ids:
            self._ids[block.index] = f"{ID_PREFIXES[block.kind]}_{new_request_id()}"
        return self._ids[block.index]

    # --- events

    def _of_step(self, step: Step) -> bytes:
        match step:
            case Begun(block):
                return self._begun(block)
            case Grown(block, text, tokens):
                place = self._place(block)
                if block.kind is BlockKind.TEXT:
                    place["logprobs"] = self._told(tokens)
                if not text and not place.get("logprobs"):
                    return b""
                return self._event(f"{EVENTS[block.kind]}.delta", **place, delta=text)
            case Ended(block):
                return self._ended(block)

    def _begun(self, block: Block) -> bytes:
        item = self._item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is BlockKind.CALL:
            return added
        empty = Block(block.index, block.kind)
        return added + self._event(
            "response.content_part.added", **self._place(block), part=self._part(empty)
        )

    def _ended(self, block: Block) -> bytes:
        place, done = self._place(block), f"{EVENTS[block.kind]}.done"
        item = self._item(block, self._status(block))
        last = ("response.output_item.done", {"output_index": block.index, "item": item})
        if block.kind is BlockKind.CALL:
            events = [(done, {**place, "name": block.name, "arguments": block.text}), last]
        else:
            part = self._part(block)
            told = {"logprobs": part["logprobs"]} if block.kind is BlockKind.TEXT else {}
            whole = (done, {**place, "text": block.text, **told})
            events = [whole, ("response.content_part.done", {**place, "part": part}), last]
        return b"".join(self._event(kind, **fields) for kind, fields in events)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})


def _cut_off(finished: Finished) -> bool:
    return finished.reason == FinishReason.LENGTH

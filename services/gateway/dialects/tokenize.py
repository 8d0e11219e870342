"""/tokenize and /detokenize: prompts to ids, and ids to text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast

from services.gateway.body import RequestBody
from services.gateway.chat import read_messages
from services.gateway.dialects.chat import ChatOptions
from services.gateway.errors import invalid
from services.gateway.request import Context
from shared.messages import Prompt


class TokenizeBody(ChatOptions):
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None  # of a text: true, of a chat: false

    def to_prompt(self, context: Context) -> Prompt:
        if self.messages is not None and self.prompt is None:
            messages, special = read_messages(self.messages), bool(self.add_special_tokens)
            return self.chat_prompt(messages, context, add_special_tokens=special)
        if self.prompt is not None and self.messages is None:
            return Prompt(text=self.prompt, add_special_tokens=self.add_special_tokens is not False)
        raise invalid("Give either prompt or messages.", "prompt")


class DetokenizeBody(RequestBody):
    tokens: Annotated[list[int], FailFast()]

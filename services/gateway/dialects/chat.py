"""/v1/chat/completions: messages, and the assistant's next one."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.body import RequestBody, Tokens
from services.gateway.chat import read_messages
from services.gateway.collector import Choice
from services.gateway.errors import invalid
from services.gateway.generation_body import GenerationBody
from services.gateway.request import Context, GenerationRequest
from services.gateway.shape import ChoiceShape, Shape
from shared.messages import Prompt


class ChatOptions(RequestBody):
    """How a chat becomes a prompt, for generation and tokenization alike."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def chat_prompt(self, messages: list[Any], *, add_special_tokens: bool) -> Prompt:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message needs add_generation_prompt false.",
                "continue_final_message",
            )
        chat = {
            "messages": read_messages(messages),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        text = json.dumps(chat, ensure_ascii=False)
        return Prompt(chat=text, add_special_tokens=add_special_tokens)


class ChatBody(GenerationBody, ChatOptions):
    messages: list[Any]  # checked in chat.py
    add_special_tokens: bool = False  # templates write the special tokens themselves
    max_completion_tokens: Tokens | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def prompts(self, context: Context) -> list[Prompt]:
        return [self.chat_prompt(self.messages, add_special_tokens=self.add_special_tokens)]

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        return ChatShape(request)


class ChatShape(ChoiceShape):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choices: list[Choice]) -> bytes:
        return b"".join(map(self._opening_event, range(len(choices))))

    def _opening_event(self, index: int) -> bytes:
        choice = (
            f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            '"finish_reason":null,"stop_reason":null}'
        )
        return f"{self._start}{choice}{self._end}".encode()

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _chunk_content(self, text: str) -> str:
        return f'"delta":{{"content":{text}}}' if text != '""' else '"delta":{}'

"""/v1/completions: a prompt as text or ids, and the text that follows."""

from __future__ import annotations

from typing import Any

from services.gateway.generation_body import GenerationBody
from services.gateway.prompts import read_prompts
from services.gateway.request import Context, GenerationRequest
from services.gateway.shape import ChoiceShape, Shape
from shared.messages import Prompt

DEFAULT_TOKENS = 16  # as OpenAI and vLLM


class CompletionBody(GenerationBody):
    prompt: Any  # its four forms are told apart in prompts.py
    add_special_tokens: bool = True

    @property
    def token_limit(self) -> int:
        return self.max_tokens or DEFAULT_TOKENS

    def prompts(self, context: Context) -> list[Prompt]:
        return read_prompts(
            self.prompt, context.vocab_size, add_special_tokens=self.add_special_tokens
        )

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        return CompletionShape(request)


class CompletionShape(ChoiceShape):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _chunk_content(self, text: str) -> str:
        return f'"text":{text}'

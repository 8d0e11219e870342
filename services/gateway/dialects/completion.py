"""/v1/completions: a prompt as text or ids, and the text that follows."""

from __future__ import annotations

from typing import Any

from services.gateway.generation_body import Alternatives, GenerationBody
from services.gateway.logprobs import as_key, completion_logprobs
from services.gateway.prompts import read_prompts
from services.gateway.request import Context, GenerationRequest
from services.gateway.shape import ChoiceShape, Shape
from services.gateway.telling import Told
from shared.messages import Prompt

DEFAULT_TOKENS = 16  # as OpenAI and vLLM


class CompletionBody(GenerationBody):
    alternatives_field = "logprobs"

    prompt: Any  # its four forms are told apart in prompts.py
    add_special_tokens: bool = True
    logprobs: Alternatives | None = None

    @property
    def token_limit(self) -> int:
        return DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_echoed(self) -> bool:
        return self.echo

    def prompts(self, context: Context) -> list[Prompt]:
        return read_prompts(
            self.prompt,
            context.vocab_size,
            add_special_tokens=self.add_special_tokens,
            truncate_to=self.truncate_to(context.max_model_len),
        )

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        return CompletionShape(request, completion_logprobs, as_key)


class CompletionShape(ChoiceShape):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _chunk_content(self, text: str) -> str:
        return f'"text":{text}'

    def _place_told(self, told: Told) -> tuple[dict[str, Any], dict[str, Any]]:
        return told.of_prompt | told.in_choice, {}

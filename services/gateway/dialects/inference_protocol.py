"""The Open Inference Protocol's generate extension, as KServe and Triton's clients speak it.

https://github.com/kserve/open-inference-protocol (specification/protocol/generate_rest.yaml)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, StringConstraints

from services.gateway.collector import Change, Choice
from services.gateway.dialect import DialectBody
from services.gateway.errors import error_body_at, invalid
from services.gateway.flight import new_request_id
from services.gateway.request import Context, GenerationRequest, Tell
from services.gateway.sampling_fields import SamplingFields
from services.gateway.shape import FINISH_REASONS, Answer, Shape, StreamShape, dump
from services.gateway.tenants import tenant_of
from services.gateway.tokens import Token
from shared.messages import Failure, Finished, Prompt

MODEL_VERSION = "1"  # a model of another version has another name
DEFAULT_TOKENS = 16
PATH = "/v2/"

Limit = Annotated[int, Field(ge=1)]
Id = Annotated[str, StringConstraints(max_length=128)]


class Parameters(SamplingFields):
    """What completions take, with `max_new_tokens` as another name and a wish for `details`."""

    max_tokens: Limit | None = None
    max_new_tokens: Limit | None = None
    details: bool = False
    logprobs: bool = False
    user: str | None = None


class GenerateBody(DialectBody):
    """POST /v2/models/MODEL/generate."""

    streams: ClassVar[bool] = False

    id: Id | None = None
    text_input: str
    parameters: Parameters = Field(default_factory=Parameters)

    def to_request(self, context: Context) -> GenerationRequest:
        asked = self.parameters
        limit = asked.max_tokens or asked.max_new_tokens or DEFAULT_TOKENS
        if asked.min_tokens > limit:
            raise invalid(f"min_tokens is more than the {limit} tokens allowed.", "min_tokens")
        params = replace(
            asked.sampling_params(context),
            max_tokens=limit,
            logprobs=0 if asked.logprobs else None,
        )
        return GenerationRequest(
            model=context.model,
            prompts=[Prompt(text=self.text_input)],
            n=1,
            params=params,
            stream=self.streams,
            tenant=tenant_of(context.key, asked.user),
            tell=Tell(logprobs=params.logprobs),
            request_id=context.request_id,
        )

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        return GenerateShape(request, self.id, details=self.parameters.details)


class GenerateStreamBody(GenerateBody):
    """POST /v2/models/MODEL/generate_stream."""

    streams = True


class GenerateShape(StreamShape):
    def __init__(self, request: GenerationRequest, name: str | None, *, details: bool) -> None:
        self.id = name or request.request_id or new_request_id()
        self._head = {
            "id": self.id,
            "model_name": request.model,
            "model_version": MODEL_VERSION,
        }
        self._details = details or request.params.logprobs is not None

    def opening(self, choices: list[Choice]) -> bytes:
        return b""

    def event(self, change: Change, choices: list[Choice]) -> bytes:
        answer = self._answer(change.text, change.tokens, change.finished, choices[change.index])
        return f"data: {dump(answer)}\n\n".encode()

    def closing(self, choices: list[Choice]) -> bytes:
        return b""

    def failed(self, failure: Failure) -> bytes:
        return f"data: {dump(error_body_at(PATH, failure))}\n\n".encode()

    def whole(self, answers: list[Answer], choices: list[Choice]) -> dict[str, Any]:
        (answer,) = answers
        return self._answer(answer.text, answer.tokens, answer.finished, choices[0])

    def _answer(
        self, text: str, tokens: list[Token], finished: Finished | None, choice: Choice
    ) -> dict[str, Any]:
        answer = {**self._head, "text_output": text}
        if not self._details:
            return answer
        details: dict[str, Any] = {
            "finish_reason": FINISH_REASONS[finished.reason] if finished else None,
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": choice.completion_tokens,
        }
        if tokens:
            details["logprobs"] = [_token(token) for token in tokens]
        return answer | {"details": details}


def _token(token: Token) -> dict[str, Any]:
    text = token.piece.decode("utf-8", "replace")
    return {"id": token.id, "text": text, "logprob": token.logprob}


def server_metadata(version: str) -> dict[str, Any]:
    return {"name": "headrace", "version": version, "extensions": ["generate", "generate_stream"]}


def model_metadata(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "versions": [MODEL_VERSION],
        "platform": "headrace",
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}],
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1]}],
    }

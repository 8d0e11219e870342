"""/v1/embeddings: texts to vectors, by the served model's own last hidden state."""

from __future__ import annotations

import base64
import math
import struct
from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.body import INT32_MAX
from services.gateway.collector import Choice
from services.gateway.dialect import DialectBody
from services.gateway.errors import invalid
from services.gateway.flight import new_request_id
from services.gateway.prompts import read_prompts
from services.gateway.request import Context, GenerationRequest
from services.gateway.shape import Answer, Shape
from services.gateway.tenants import tenant_of
from shared.messages import FLOAT_BYTES
from shared.sampling import SamplingParams


class EmbeddingBody(DialectBody):
    input: Any  # its four forms are told apart in prompts.py
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0

    def to_request(self, context: Context) -> GenerationRequest:
        size = context.hidden_size
        if self.dimensions is not None and self.dimensions > size:
            raise invalid(f"dimensions: this model's vectors have {size}.", "dimensions")
        return GenerationRequest(
            model=context.model,
            prompts=read_prompts(
                self.input,
                context.vocab_size,
                add_special_tokens=self.add_special_tokens,
                truncate_to=self.truncate_prompt_tokens,
                param="input",
            ),
            n=1,
            params=SamplingParams(seed=0, temperature=0.0, max_tokens=0, embed=True),
            stream=False,
            tenant=tenant_of(context.key, self.user),
            priority=self.priority,
        )

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        return EmbeddingShape(request, self.dimensions, self.encoding_format)


class EmbeddingShape(Shape):
    def __init__(self, request: GenerationRequest, dimensions: int | None, form: str) -> None:
        self.id = f"embd-{request.request_id or new_request_id()}"
        self._model = request.model
        self._dimensions = dimensions
        self._form = form

    def whole(self, answers: list[Answer], choices: list[Choice]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(answer)}
            for index, answer in enumerate(answers)
        ]
        tokens = sum(choice.prompt_tokens for choice in choices)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage, "id": self.id}

    def _vector(self, answer: Answer) -> list[float] | str:
        raw = answer.finished.embedding
        if self._dimensions is not None:
            raw = _shortened(raw, self._dimensions)
        if self._form == "base64":
            return base64.b64encode(raw).decode()
        return list(struct.unpack(f"<{len(raw) // FLOAT_BYTES}f", raw))


def _shortened(raw: bytes, dimensions: int) -> bytes:
    """The first numbers of a vector, made a unit vector again."""
    values = struct.unpack(f"<{dimensions}f", raw[: dimensions * FLOAT_BYTES])
    norm = math.sqrt(sum(value * value for value in values)) or 1.0
    return struct.pack(f"<{dimensions}f", *(value / norm for value in values))

"""What a dialect is to the rest of the gateway: a body that asks, and a shape that answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import StringConstraints

from services.gateway.body import RequestBody
from services.gateway.request import Context, GenerationRequest
from services.gateway.shape import Shape

RequestName = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$")]


class DialectBody(RequestBody):
    """A body that asks for generated text."""

    # Fields as the mesh and chats call them -> their names here, for errors
    param_names: ClassVar[Mapping[str, str]] = {}

    request_id: RequestName | None = None

    def to_request(self, context: Context) -> GenerationRequest:
        """Raises ApiError for fields that do not fit one another or the model."""
        raise NotImplementedError

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        """How the answer to this body is written."""
        raise NotImplementedError

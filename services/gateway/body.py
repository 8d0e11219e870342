"""What all bodies of requests have in common: strictness, and how their faults are told."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.gateway.errors import ApiError, invalid
from services.gateway.fields import refuse_unsupported

INT32_MAX = 2**31 - 1
SHOWN_ERRORS = 3

Body = TypeVar("Body", bound="RequestBody")
Tokens = Annotated[int, Field(ge=1, le=INT32_MAX)]


class RequestBody(BaseModel):
    """Strict: no text for numbers, no NaN; null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """Fields that are not declared here."""
        return self.model_extra or {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


def parse(kind: type[Body], raw: bytes) -> Body:
    """Validate a JSON body; raises ApiError naming the first fields at fault."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _of_validation(error) from None
    refuse_unsupported(body.extra)
    return body


def _of_validation(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)
    shown = first[:SHOWN_ERRORS]
    text = "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}"[:300] for one in shown
    )
    more = f" (and {len(first) - len(shown)} more)" if len(first) > len(shown) else ""
    place = shown[0]["loc"]
    return invalid(text + more, str(place[0]) if place else None)

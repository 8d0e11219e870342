"""What became of one prompt or conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.batch.failures import RequestFailed


@dataclass(frozen=True, slots=True)
class Result:
    """Either `response` or `error` is there; without a response there is no text."""

    prompt: Any  # as it was given: a text, token ids, or a conversation
    response: dict[str, Any] | None  # the server's whole answer
    error: RequestFailed | None

    @property
    def text(self) -> str | None:
        """The first sample's."""
        return next(iter(self.texts), None)

    @property
    def texts(self) -> list[str]:
        """Of all n samples."""
        return [_text(choice) for choice in self._choices]

    @property
    def finish_reason(self) -> str | None:
        """Why the first sample ended: `stop`, `length` ..."""
        return next((choice["finish_reason"] for choice in self._choices), None)

    @property
    def usage(self) -> dict[str, Any] | None:
        """Tokens, of all samples together."""
        return self.response and self.response.get("usage")

    @property
    def _choices(self) -> list[dict[str, Any]]:
        choices = self.response["choices"] if self.response else []
        return sorted(choices, key=lambda choice: choice["index"])


def _text(choice: dict[str, Any]) -> str:
    if "message" in choice:
        return choice["message"].get("content") or ""
    text: str = choice["text"]
    return text

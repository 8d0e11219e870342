"""What an answer says of tokens beside its text, by the client's wishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from services.gateway.logprobs import Name, as_id, prompt_logprobs
from services.gateway.request import Tell
from services.gateway.tokens import Token

Form: TypeAlias = Callable[[list[Token], int, Name], dict[str, Any]]  # of a `logprobs` object


@dataclass(frozen=True, slots=True)
class Told:
    """Of some tokens of one choice."""

    logprobs: dict[str, Any] | None = None
    in_choice: dict[str, Any] = field(default_factory=dict)  # further fields
    of_prompt: dict[str, Any] = field(default_factory=dict)  # beside the choices, or in each


class Teller:
    """Tells the same of tokens, whether they come one by one or all together."""

    def __init__(self, tell: Tell, form: Form, name: Name) -> None:
        self._tell = tell
        self._form = form
        self._name = as_id if tell.ids_as_names else name

    def told(self, tokens: list[Token], prompt_tokens: int) -> Told:
        """Of these tokens; those at positions below `prompt_tokens` are the prompt's."""
        tell = self._tell
        prompt = [token for token in tokens if token.position < prompt_tokens]
        output = tokens[len(prompt) :]
        logprobs: dict[str, Any] | None = None
        in_choice: dict[str, Any] = {}
        of_prompt: dict[str, Any] = {}
        shown = tokens if tell.of_prompt else output
        if tell.logprobs is not None and shown:
            logprobs = self._form(shown, tell.logprobs, self._name)
        if tell.token_ids:
            in_choice["token_ids"] = [token.id for token in output]
        if tell.token_ids and prompt:
            of_prompt["prompt_token_ids"] = [token.id for token in prompt]
        if tell.prompt_logprobs is not None and prompt:
            of_prompt["prompt_logprobs"] = prompt_logprobs(prompt, tell.prompt_logprobs)
        return Told(logprobs, in_choice, of_prompt)

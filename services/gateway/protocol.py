"""The bodies of requests: what may stand in them, and what is asked for in our own terms."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from services.gateway.chat import read_messages
from services.gateway.errors import ApiError, invalid
from services.gateway.fields import refuse_unsupported
from services.gateway.prompts import read_ids, read_prompts
from services.gateway.tenants import tenant_of
from shared.messages import Prompt
from shared.sampling import SamplingParams

INT32_MAX = 2**31 - 1
SEEDS = 2**63
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI and vLLM
MAX_N = 128
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 16, 1024, 1024
MAX_SALT_CHARS = 1024
SHOWN_ERRORS = 3

Body = TypeVar("Body", bound="RequestBody")
Tokens = Annotated[int, Field(ge=1, le=INT32_MAX)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[Stop],
    FailFast(),
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT_CHARS)]
StopIds = Annotated[list[int], FailFast(), Field(max_length=MAX_STOP_IDS)]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asked for, checked: `n` samples of each prompt."""

    model: str  # the name to answer with
    prompts: list[Prompt]
    n: int
    params: SamplingParams  # of the first sample
    stream: bool
    include_usage: bool
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""

    @property
    def size(self) -> int:
        """Sequences; the one at prompt p and sample s has the index p * n + s."""
        return len(self.prompts) * self.n

    def params_of(self, sample: int) -> SamplingParams:
        return replace(self.params, seed=(self.params.seed + sample) % SEEDS)


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


class StreamOptions(RequestBody):
    include_usage: bool = False


class GenerationBody(RequestBody):
    """What completions and chat completions have in common."""

    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] = -1  # -1: as if not given
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    best_of: int | None = None
    stop: Stops = []
    stop_token_ids: StopIds = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    cache_salt: Salt | None = None

    def prompts(self, vocab_size: int) -> list[Prompt]:
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """None: up to the end of the context."""
        raise NotImplementedError

    def to_request(
        self,
        model: str,
        vocab_size: int,
        draw_seed: Callable[[], int],
        key: int | None = None,
    ) -> GenerationRequest:
        """`key` is the number of the API key that was sent.

        Raises ApiError for fields that do not fit one another or the model.
        """
        self._check_together()
        seed = draw_seed() if self.seed == -1 else self.seed % SEEDS
        params = SamplingParams(
            seed=seed,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            max_tokens=self.token_limit,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=read_ids(self.stop_token_ids, vocab_size, "stop_token_ids"),
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )
        usage = self.stream_options is not None and self.stream_options.include_usage
        return GenerationRequest(
            model=model,
            prompts=self.prompts(vocab_size),
            n=self.n,
            params=params,
            stream=self.stream,
            include_usage=usage,
            tenant=tenant_of(key, self.user),
            priority=self.priority,
            cache_salt=self.cache_salt or "",
        )

    def _check_together(self) -> None:
        if self.stream_options is not None:
            if not self.stream:
                raise invalid("stream_options is only allowed with stream.", "stream_options")
            if self.stream_options.extra.get("continuous_usage_stats"):
                raise invalid(
                    "stream_options.continuous_usage_stats is not supported yet; leave it out.",
                    "stream_options",
                    "unsupported_parameter",
                )
        if self.best_of not in (None, self.n):
            raise invalid(
                "best_of is not supported yet, except when equal to n.",
                "best_of",
                "unsupported_parameter",
            )
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise invalid(
                f"min_tokens {self.min_tokens} is more than the {self.token_limit} tokens allowed.",
                "min_tokens",
            )


class CompletionBody(GenerationBody):
    prompt: Any  # its four forms are told apart in prompts.py
    add_special_tokens: bool = True

    @property
    def token_limit(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    def prompts(self, vocab_size: int) -> list[Prompt]:
        return read_prompts(self.prompt, vocab_size, add_special_tokens=self.add_special_tokens)


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

    def prompts(self, vocab_size: int) -> list[Prompt]:
        return [self.chat_prompt(self.messages, add_special_tokens=self.add_special_tokens)]


class TokenizeBody(ChatOptions):
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None  # of a text: true, of a chat: false

    def to_prompt(self) -> Prompt:
        if self.messages is not None and self.prompt is None:
            special = bool(self.add_special_tokens)
            return self.chat_prompt(self.messages, add_special_tokens=special)
        if self.prompt is not None and self.messages is None:
            return Prompt(text=self.prompt, add_special_tokens=self.add_special_tokens is not False)
        raise invalid("Give either prompt or messages.", "prompt")


class DetokenizeBody(RequestBody):
    tokens: Annotated[list[int], FailFast()]

"""The fields that completions and chat completions have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, FailFast, Field, StringConstraints

from services.gateway.body import INT32_MAX, RequestBody, Tokens
from services.gateway.dialect import DialectBody
from services.gateway.errors import invalid
from services.gateway.prompts import read_ids
from services.gateway.request import SEEDS, Context, GenerationRequest
from services.gateway.tenants import tenant_of
from shared.messages import Prompt
from shared.sampling import SamplingParams

MAX_N = 128
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 16, 1024, 1024
MAX_SALT_CHARS = 1024

Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[Stop],
    FailFast(),
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT_CHARS)]
StopIds = Annotated[list[int], FailFast(), Field(max_length=MAX_STOP_IDS)]


class StreamOptions(RequestBody):
    include_usage: bool = False


class GenerationBody(DialectBody):
    """The parameters of OpenAI's and vLLM's requests."""

    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] = -1  # -1: as if not given
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    best_of: int | None = None
    stop: Stops = Field(default_factory=list)
    stop_token_ids: StopIds = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    cache_salt: Salt | None = None

    def prompts(self, context: Context) -> list[Prompt]:
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """None: up to the end of the context."""
        raise NotImplementedError

    def to_request(self, context: Context) -> GenerationRequest:
        self._check_together()
        usage = self.stream_options is not None and self.stream_options.include_usage
        return GenerationRequest(
            model=context.model,
            prompts=self.prompts(context),
            n=self.n,
            params=self._params(context),
            stream=self.stream,
            include_usage=usage,
            tenant=tenant_of(context.key, self.user),
            priority=self.priority,
            cache_salt=self.cache_salt or "",
        )

    def _params(self, context: Context) -> SamplingParams:
        return SamplingParams(
            seed=context.draw_seed() if self.seed == -1 else self.seed % SEEDS,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            max_tokens=self.token_limit,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=read_ids(self.stop_token_ids, context.vocab_size, "stop_token_ids"),
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
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

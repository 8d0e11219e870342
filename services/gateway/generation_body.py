"""The fields that completions and chat completions have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from services.gateway.body import INT32_MAX, RequestBody
from services.gateway.dialect import DialectBody
from services.gateway.errors import invalid
from services.gateway.request import Context, GenerationRequest, Tell
from services.gateway.sampling_fields import SamplingFields
from services.gateway.tenants import tenant_of
from shared.messages import Prompt
from shared.sampling import SamplingParams

MAX_N = 128
MAX_SALT_CHARS = 1024

TokenLimit = Annotated[int, Field(ge=0, le=INT32_MAX)]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT_CHARS)]
Alternatives = Annotated[int, Field(ge=0)]


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(DialectBody, SamplingFields):
    """The parameters of OpenAI's and vLLM's requests."""

    alternatives_field: ClassVar[str]  # the one that says how many

    max_tokens: TokenLimit | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    cache_salt: Salt | None = None

    def prompts(self, context: Context) -> list[Prompt]:
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """None: up to the end of the context."""
        raise NotImplementedError

    @property
    def limit_field(self) -> str:
        """The field that says it."""
        return "max_tokens"

    @property
    def alternatives(self) -> int | None:
        """To each token of the answer; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def prompt_echoed(self) -> bool:
        """Whether the answer begins with the whole prompt."""
        return False

    def to_request(self, context: Context) -> GenerationRequest:
        self._check_together()
        usage = self.stream_options or StreamOptions()
        tell = self._tell(context.max_logprobs)
        return GenerationRequest(
            model=context.model,
            prompts=self.prompts(context),
            n=self.n,
            params=self._params(context, tell),
            stream=self.stream,
            include_usage=usage.include_usage,
            tenant=tenant_of(context.key, self.user),
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            continuous_usage=usage.continuous_usage_stats,
            best_of=self.best_of,
            tell=tell,
            request_id=context.request_id,
        )

    def _params(self, context: Context, tell: Tell) -> SamplingParams:
        of_prompt = [tell.logprobs] if tell.of_prompt else []
        asked = [count for count in (*of_prompt, tell.prompt_logprobs) if count is not None]
        ranked = self._draws_more and tell.logprobs is None
        return replace(
            self.sampling_params(context),
            max_tokens=self.token_limit,
            logprobs=0 if ranked else tell.logprobs,
            prompt_logprobs=max(asked, default=None),
            return_token_ids=self.return_token_ids,
            echo=self.prompt_echoed,
        )

    def _tell(self, most: int) -> Tell:
        alternatives = self.alternatives
        asked = {self.alternatives_field: alternatives, "prompt_logprobs": self.prompt_logprobs}
        for name, count in asked.items():
            if count is not None and count > most:
                raise invalid(f"{name}: must be at most {most} on this server.", name)
        return Tell(
            logprobs=alternatives,
            of_prompt=self.prompt_echoed,
            prompt_logprobs=self.prompt_logprobs,
            token_ids=self.return_token_ids,
            ids_as_names=self.return_tokens_as_token_ids,
        )

    def truncate_to(self, max_model_len: int) -> int | None:
        """Raises ApiError."""
        wanted = self.truncate_prompt_tokens
        if wanted == -1:  # as many as fit
            answer = 1 if self.token_limit is None else self.token_limit
            return max(max_model_len - answer, 1)
        if wanted is not None and not 1 <= wanted <= max_model_len:
            message = f"truncate_prompt_tokens: must be -1, or from 1 to {max_model_len}."
            raise invalid(message, "truncate_prompt_tokens")
        return wanted

    @property
    def _draws_more(self) -> bool:
        return self.best_of is not None and self.best_of > self.n

    def _check_together(self) -> None:
        options = self.stream_options
        if options is not None and not self.stream:
            raise invalid("stream_options is only allowed with stream.", "stream_options")
        if options and options.continuous_usage_stats and not options.include_usage:
            message = "stream_options.continuous_usage_stats needs include_usage."
            raise invalid(message, "stream_options")
        if self.best_of is not None and self.best_of < self.n:
            raise invalid(f"best_of must be at least n, which is {self.n}.", "best_of")
        if self._draws_more and self.stream:
            raise invalid("best_of above n is known at the end only: not with stream.", "best_of")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs is not available with stream.", "prompt_logprobs")
        self._check_limit()

    def _check_limit(self) -> None:
        limit = self.token_limit
        if limit == 0 and not self.prompt_echoed:
            message = f"{self.limit_field}: must be at least 1, or 0 with echo in completions."
            raise invalid(message, self.limit_field)
        if limit is not None and self.min_tokens > limit:
            message = f"min_tokens {self.min_tokens} is more than the {limit} tokens allowed."
            raise invalid(message, "min_tokens")

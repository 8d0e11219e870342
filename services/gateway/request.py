"""What a client asked for, in our own terms: every dialect's bodies become this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.gateway.output import OutputParser
from services.gateway.parsing.answers import Formats
from shared.messages import Prompt
from shared.sampling import SamplingParams

SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Context:
    """What a body is read against."""

    model: str  # the name to answer with
    vocab_size: int
    max_model_len: int
    draw_seed: Callable[[], int]
    key: str | None = None  # the name of the API key that was sent
    request_id: str = ""  # the client's name for the request, or a drawn one
    max_logprobs: int = 20
    trust_chat_template: bool = False  # one that comes with a request
    formats: Formats = field(default_factory=Formats)  # of calls and reasoning
    hidden_size: int = 0  # numbers of an embedding


@dataclass(frozen=True, slots=True)
class Tell:
    """What the answer tells of tokens; whatever is None or false is not told."""

    logprobs: int | None = None  # alternatives to each token
    of_prompt: bool = False  # `logprobs` begins with the prompt's tokens
    prompt_logprobs: int | None = None  # alternatives to each
    token_ids: bool = False
    ids_as_names: bool = False  # tokens are called by their ids, not their texts


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Checked: `n` answers to each prompt, the best of `samples` sequences."""

    model: str  # the name to answer with
    prompts: list[Prompt]
    n: int
    params: SamplingParams  # of the first sample
    stream: bool
    include_usage: bool = False  # an event with the usage ends the stream
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    continuous_usage: bool = False  # all events have the usage so far
    best_of: int | None = None
    tell: Tell = field(default_factory=Tell)
    request_id: str = ""  # the client's name for it
    new_parser: Callable[[], OutputParser] | None = None  # of one answer; None: all is content

    @property
    def samples(self) -> int:
        """Sequences for each prompt."""
        return self.best_of or self.n

    @property
    def size(self) -> int:
        """Sequences; the one at prompt p and sample s has the index p * samples + s."""
        return len(self.prompts) * self.samples

    def params_of(self, sample: int) -> SamplingParams:
        return replace(self.params, seed=(self.params.seed + sample) % SEEDS)

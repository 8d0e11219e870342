"""The fields that say how tokens are chosen and where an answer ends."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field, StringConstraints

from services.gateway.body import INT32_MAX, RequestBody
from services.gateway.errors import invalid
from services.gateway.grammar_fields import FIELDS, read_grammar
from services.gateway.prompts import read_ids
from services.gateway.request import SEEDS, Context
from shared.sampling import Grammar, LogitBias, SamplingParams
from shared.types import int32s

MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 16, 1024, 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 1024
MAX_BIASES = 1024

Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[Stop],
    FailFast(),
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
StopIds = Annotated[list[int], FailFast(), Field(max_length=MAX_STOP_IDS)]
BadWord = Annotated[str, StringConstraints(pattern=r"\S", max_length=MAX_BAD_WORD_CHARS)]
BadWords = Annotated[list[BadWord], FailFast(), Field(max_length=MAX_BAD_WORDS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[TokenName, Bias], Field(max_length=MAX_BIASES)]


class GrammarFields(RequestBody):
    """What form the answer must have; read in grammar_fields.py."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None

    def grammar(self) -> Grammar | None:
        """Raises ApiError."""
        return read_grammar({name: getattr(self, name) for name in FIELDS})


class SamplingFields(GrammarFields):
    """As OpenAI and vLLM name them."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] = -1  # -1: as if not given
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    logit_bias: Biases = Field(default_factory=dict)
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)  # []: all
    bad_words: BadWords = Field(default_factory=list)
    stop: Stops = Field(default_factory=list)
    stop_token_ids: StopIds = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def sampling_params(self, context: Context) -> SamplingParams:
        """Raises ApiError for what does not fit the model."""
        allowed = read_ids(self.allowed_token_ids, context.vocab_size, "allowed_token_ids")
        return SamplingParams(
            seed=context.draw_seed() if self.seed == -1 else self.seed % SEEDS,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=read_ids(self.stop_token_ids, context.vocab_size, "stop_token_ids"),
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._biases(context.vocab_size),
            allowed_token_ids=int32s(sorted(set(allowed))),
            bad_words=self.bad_words,
            grammar=self.grammar(),
        )

    def _biases(self, vocab_size: int) -> list[LogitBias]:
        found = {int(name): value for name, value in self.logit_bias.items()}
        if max(found, default=0) >= vocab_size:
            message = f"logit_bias: token ids must be from 0 to {vocab_size - 1}."
            raise invalid(message, "logit_bias")
        return [LogitBias(*pair) for pair in found.items()]

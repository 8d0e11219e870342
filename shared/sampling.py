"""How a request wants its tokens chosen and its text cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, TypeAlias

from shared.bounds import AtMost, Count, Number, Share, Within
from shared.types import Int32s, int32s

Penalty: TypeAlias = Annotated[float, Within(-100, 100)]
Alternatives: TypeAlias = Annotated[int, Within(0, 1000)]
Texts: TypeAlias = Annotated[list[Annotated[str, AtMost(16384)]], AtMost(1024)]

GREEDY_TEMPERATURE = 1e-5  # at or below it, dividing by it could overflow: take the best token


class GrammarKind(IntEnum):
    """The languages in which the form of an answer can be described."""

    JSON_SCHEMA = 1  # JSON text
    REGEX = 2
    LARK = 3


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer's text must look like, from its first character to its end."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What is added to the logit of a token."""

    token_id: Count
    value: Annotated[float, Within(-1e6, 1e6)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping parameters of one sequence, as vLLM names them.

    `max_tokens` None means "up to the context's end"; 0: the prompt is computed and nothing is
    generated. `seed` is always set: the gateway draws one if the client gave none.
    `top_k` 0 means no limit. `bad_word_ids` are made of `bad_words` by the tokenizer.
    """

    seed: Number
    temperature: Annotated[float, Within(0, 100)] = 1.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Share = 0.0
    max_tokens: Count | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Int32s = field(default_factory=int32s)
    stop: Texts = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # What changes the logits before a token is chosen
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Within(0, 100)] = 1.0
    logit_bias: Annotated[list[LogitBias], AtMost(65536)] = field(default_factory=list)
    allowed_token_ids: Int32s = field(default_factory=int32s)  # none: all are
    bad_words: Texts = field(default_factory=list)
    bad_word_ids: Annotated[list[Int32s], AtMost(4096)] = field(default_factory=list)
    grammar: Grammar | None = None
    # What is told beside the text
    logprobs: Alternatives | None = (
        None  # so many alternatives with each generated token; None: nothing
    )
    prompt_logprobs: Alternatives | None = None  # the same with the prompt's tokens
    return_token_ids: bool = False
    echo: bool = False  # the prompt's text comes first
    embed: bool = False  # the hidden state of the prompt's last token, with `max_tokens` 0

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def hidden_tokens(self) -> bool:
        """Whether the one token that ends the sequence is nobody's."""
        return self.max_tokens == 0

    @property
    def jumps(self) -> bool:
        """Whether tokens that its grammar forces may be taken without being sampled.

        Not where each has logprobs to be told, or may be ruled out by its id.
        """
        ruled = self.logit_bias or self.allowed_token_ids or self.bad_word_ids
        return self.grammar is not None and self.logprobs is None and not ruled

    @property
    def wants_tokens(self) -> bool:
        """Whether the client is told of tokens, not only of text."""
        wanted = (self.logprobs, self.prompt_logprobs)
        return self.return_token_ids or any(count is not None for count in wanted)

"""How a request wants its tokens chosen and its text cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.types import Int32s, int32s

GREEDY_TEMPERATURE = 1e-5  # at or below it, dividing by it could overflow: take the best token


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping parameters of one sequence, as vLLM names them.

    `max_tokens` None means "up to the context's end"; the tokenizer resolves it before `Submit`.
    `seed` is always set: the gateway draws one if the client gave none.
    `top_k` 0 means no limit.
    """

    seed: int  # 0 .. 2**63 - 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Int32s = field(default_factory=int32s)
    stop: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

"""What a client asked for, in our own terms: every dialect's bodies become this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    key: int | None = None  # the number of the API key that was sent


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Checked: `n` samples of each prompt."""

    model: str  # the name to answer with
    prompts: list[Prompt]
    n: int
    params: SamplingParams  # of the first sample
    stream: bool
    include_usage: bool = False  # an event with the usage ends the stream
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""

    @property
    def size(self) -> int:
        """Sequences; the one at prompt p and sample s has the index p * n + s."""
        return len(self.prompts) * self.n

    def params_of(self, sample: int) -> SamplingParams:
        return replace(self.params, seed=(self.params.seed + sample) % SEEDS)

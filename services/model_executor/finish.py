"""When a sequence ends, by what it has sampled."""

from __future__ import annotations

from dataclasses import dataclass

from shared.sampling import SamplingParams
from shared.types import FinishReason


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stopping parameters of one sequence, as positions of its tokens."""

    end_ids: frozenset[int]  # end-of-sequence ids and the request's own stop token ids
    first_end: int  # before this position an end id neither counts nor is sampled
    last: int  # the position of the last token it may have

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_tokens: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> StopRules:
        own = frozenset(params.stop_token_ids)
        room = max_model_len if params.max_tokens is None else prompt_tokens + params.max_tokens
        if params.hidden_tokens:  # what it is does not matter
            own = eos_token_ids = frozenset()
        return cls(
            end_ids=own if params.ignore_eos else own | eos_token_ids,
            first_end=prompt_tokens + params.min_tokens,
            last=min(room, max_model_len) - 1,
        )

    def reason(self, token: int, position: int) -> FinishReason:
        """Whether the sequence ends with this token, which is the one at `position`."""
        if position >= self.first_end and token in self.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if position >= self.last else FinishReason.NONE


FREE_SLOT = StopRules(frozenset(), 0, 0)

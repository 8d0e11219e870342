"""When sequences end."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.model_executor.finish import StopRules
from shared.sampling import SamplingParams
from shared.types import FinishReason, int32s

EOS = frozenset({2, 7})


def rules(prompt_tokens: int = 10, max_model_len: int = 100, **params: Any) -> StopRules:
    given = {"seed": 0, "max_tokens": 5} | params
    return StopRules.of(SamplingParams(**given), prompt_tokens, EOS, max_model_len)


def test_an_end_id_stops() -> None:
    assert rules().reason(7, 10) is FinishReason.STOP
    assert rules().reason(3, 10) is FinishReason.NONE


def test_ignore_eos_leaves_the_requests_own_stop_ids() -> None:
    own = rules(ignore_eos=True, stop_token_ids=int32s([3]))
    assert own.reason(2, 10) is FinishReason.NONE
    assert own.reason(3, 10) is FinishReason.STOP


def test_the_last_token_is_counted_from_the_prompt() -> None:
    assert rules().reason(3, 13) is FinishReason.NONE
    assert rules().reason(3, 14) is FinishReason.LENGTH


def test_an_end_id_as_the_last_token_is_a_stop() -> None:
    assert rules().reason(2, 14) is FinishReason.STOP


def test_the_context_ends_a_sequence() -> None:
    assert rules(max_model_len=12).reason(3, 10) is FinishReason.NONE
    assert rules(max_model_len=12).reason(3, 11) is FinishReason.LENGTH
    assert rules(max_model_len=12, max_tokens=None).reason(3, 11) is FinishReason.LENGTH


def test_no_end_id_counts_before_min_tokens() -> None:
    held = rules(min_tokens=3)
    assert held.reason(2, 12) is FinishReason.NONE  # the third token
    assert held.reason(2, 13) is FinishReason.STOP


@given(
    prompt=st.integers(1, 50),
    max_tokens=st.integers(1, 60),
    min_tokens=st.integers(0, 60),
    length=st.integers(51, 100),
)
def test_a_sequence_gets_its_tokens_and_no_more(
    prompt: int, max_tokens: int, min_tokens: int, length: int
) -> None:
    own = rules(prompt, length, max_tokens=max_tokens, min_tokens=min_tokens)
    produced = 0
    reason = FinishReason.NONE
    while reason is FinishReason.NONE:
        reason = own.reason(2, prompt + produced)  # it would end at once if it might
        produced += 1
    room = min(max_tokens, length - prompt)
    assert produced == min(min_tokens + 1, room)
    assert reason is (FinishReason.STOP if min_tokens < room else FinishReason.LENGTH)

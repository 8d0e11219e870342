"""The four forms of a completion's prompt: a text, ids, or a list of either."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import ApiError, invalid
from shared.messages import Prompt
from shared.types import Int32s, int32s

MAX_PROMPTS = 4096


def read_prompts(
    value: Any,
    vocab_size: int,
    *,
    add_special_tokens: bool,
    truncate_to: int | None = None,
    param: str = "prompt",
) -> list[Prompt]:
    """One Prompt for each text or list of ids; raises ApiError naming the field `param`."""

    def of_text(text: str) -> Prompt:
        return Prompt(text=text, add_special_tokens=add_special_tokens, truncate_to=truncate_to)

    def of_ids(ids: list[int]) -> Prompt:
        return Prompt(token_ids=read_ids(ids, vocab_size, param), truncate_to=truncate_to)

    if isinstance(value, str):
        return [of_text(value)]
    if not isinstance(value, list) or not value:
        raise _invalid(param)
    if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise invalid(f"{param}: more than {MAX_PROMPTS} prompts.", param)
    kinds = set(map(type, value))
    if kinds == {int}:
        return [of_ids(value)]
    if kinds == {str}:
        return list(map(of_text, value))
    if kinds == {list} and all(set(map(type, ids)) == {int} for ids in value):
        return list(map(of_ids, value))
    raise _invalid(param)


def read_ids(ids: list[int], vocab_size: int, param: str) -> Int32s:
    """Token ids as a column; raises ApiError for one outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise invalid(f"{param}: token ids must be from 0 to {vocab_size - 1}.", param)
    return int32s(ids)


def _invalid(param: str) -> ApiError:
    return invalid(
        f"{param}: must be a text, a list of texts, a list of token ids or a list of lists of"
        " token ids, none of the lists empty.",
        param,
    )

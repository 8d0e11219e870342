from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.detokenizer.decoder import Decoders
from services.detokenizer.journal import Journal
from shared.codec import Identity
from shared.messages import Finished, Open
from shared.sampling import SamplingParams
from shared.types import FinishReason, Handle, Incarnation, RequestId, ServiceName, int32s

SCHEDULER = Identity(ServiceName.SCHEDULER, "scheduler.0", Incarnation(7))
PROMPT = [1, 5, 6]
END = 2  # <|im_end|>, the model's own end
NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH
PARAMS = SamplingParams(seed=1, max_tokens=100)


def journal(real: Decoders, params: SamplingParams = PARAMS) -> Journal:
    opened = Open(RequestId("r"), Handle(1), "gateway.0", int32s(PROMPT), params)
    return Journal(opened, SCHEDULER, real, frozenset({END}))


def play(
    journal: Journal, ids: list[int], reason: FinishReason = LENGTH
) -> tuple[list[str], Finished]:
    """Take tokens until the end; the last one has the executor's `reason`."""
    texts = []
    for place, one in enumerate(ids):
        texts.append(journal.take(one, reason if place == len(ids) - 1 else NONE))
        if journal.finished is not None:
            return texts, journal.finished
    raise AssertionError("it has not ended")


@given(st.lists(st.integers(0, 49151), min_size=1, max_size=30))
def test_all_increments_together_are_the_text(
    real: Decoders, library: Tokenizer, ids: list[int]
) -> None:
    one = journal(real)
    texts, finished = play(one, ids)
    assert "".join(texts) == library.decode(ids)
    assert finished == Finished(RequestId("r"), LENGTH, len(ids))
    assert one.output == int32s(ids)
    assert one.next_position == len(PROMPT) + len(ids)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("as_string", [False, True])
def test_an_end_token_counts_but_shows_only_if_all_is_asked_for(
    real: Decoders, library: Tokenizer, include: bool, skip: bool, as_string: bool
) -> None:
    """R032: the same whether it is the model's end or was given as a stop string."""
    params = replace(
        PARAMS,
        ignore_eos=as_string,
        stop=["<|im_end|>"] if as_string else [],
        stop_token_ids=int32s([END] if as_string else []),
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    words = library.encode("Hello world").ids
    texts, finished = play(journal(real, params), [*words, END], STOP)
    mark = "<|im_end|>" if include and not skip else ""
    assert "".join(texts) == "Hello world" + mark
    assert finished.completion_tokens == len(words) + 1
    assert finished.stop_reason == ("<|im_end|>" if as_string else None)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_id_is_its_own_reason(
    real: Decoders, library: Tokenizer, include: bool
) -> None:
    hello, world = library.encode("Hello world").ids
    params = replace(PARAMS, stop_token_ids=int32s([world]), include_stop_str_in_output=include)
    texts, finished = play(journal(real, params), [hello, world], STOP)
    assert "".join(texts) == ("Hello world" if include else "Hello")
    assert finished.stop_reason == world


def test_half_a_character_at_the_end_is_not_lost(real: Decoders, library: Tokenizer) -> None:
    ids = library.encode("x🫠").ids[:-1]
    for reason in (LENGTH, STOP):
        texts, _ = play(journal(real), [*ids, END], reason)
        assert "".join(texts) == library.decode(ids) == "x\ufffd"


@given(start=st.integers(0, 60), length=st.integers(1, 12), include=st.booleans())
def test_a_stop_string_ends_the_text_wherever_tokens_end(
    real: Decoders, library: Tokenizer, start: int, length: int, include: bool
) -> None:
    """R001, R002: no piece shows any of it, and the count is of the tokens that were needed."""
    text = "One two three, four five.\n\nSix 🫠 seven; 8 9 10 eleven -- twelve!"
    ids = library.encode(text).ids
    stop = text[start : start + length]
    params = replace(PARAMS, stop=[stop], include_stop_str_in_output=include)
    texts, finished = play(journal(real, params), ids)
    place = text.index(stop)
    expected = text[: place + (len(stop) if include else 0)]
    assert "".join(texts) == expected
    assert (finished.reason, finished.stop_reason) == (STOP, stop)
    needed = finished.completion_tokens
    assert stop in library.decode(ids[:needed]) and stop not in library.decode(ids[: needed - 1])


def test_text_held_for_a_stop_string_is_released_at_the_end(
    real: Decoders, library: Tokenizer
) -> None:
    ids = library.encode("Hello wor").ids
    texts, finished = play(journal(real, replace(PARAMS, stop=["world"])), ids)
    assert "".join(texts) == "Hello wor"
    assert finished.reason is LENGTH


def test_a_stop_string_in_the_last_token_wins_over_the_length(
    real: Decoders, library: Tokenizer
) -> None:
    ids = library.encode("Hello world").ids
    texts, finished = play(journal(real, replace(PARAMS, stop=["wor"])), ids, LENGTH)
    assert "".join(texts) == "Hello "
    assert (finished.reason, finished.stop_reason) == (STOP, "wor")


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, ""), (1, "a b"), (2, "a b"), (3, "a b a b")]
)
def test_stop_strings_are_not_looked_for_within_min_tokens(
    real: Decoders, library: Tokenizer, min_tokens: int, expected: str
) -> None:
    a, b = library.encode("a b").ids
    space_a = library.encode(" a").ids[0]
    params = replace(PARAMS, stop=["a"], min_tokens=min_tokens)
    texts, _ = play(journal(real, params), [a, b, space_a, b, space_a, b])
    assert "".join(texts).strip() == expected


def test_the_prompts_text_is_never_shown(real: Decoders, library: Tokenizer) -> None:
    """R008: the prompt ends within a character that the answer completes."""
    ids = library.encode("Hello 🫠").ids
    opened = Open(RequestId("r"), Handle(1), "gateway.0", int32s(ids[:-1]), PARAMS)
    one = Journal(opened, SCHEDULER, real, frozenset({END}))
    texts, _ = play(one, ids[-1:])
    assert "Hello" not in "".join(texts)
    assert "".join(texts) == library.decode(ids[-1:])

"""Requests that want their prompt: echoed, only computed, or embedded."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.decoder import Decoders
from shared.messages import Embedding, Finished
from shared.types import FinishReason, Handle
from tests.services.detokenizer.answers import (
    END,
    LENGTH,
    NONE,
    SCHEDULER,
    STOP,
    Answer,
    R,
    chunk,
    opened,
    run,
    sampled,
    thought,
)
from tests.services.detokenizer.vocabulary import SENTENCEPIECE, VOCABULARY, ids_of_bytes, save


@settings(max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_an_echoed_prompt_and_its_answer_are_decoded_as_one(
    real: Decoders, library: Tokenizer, byte_ids: list[int], data: st.DataObject, skip: bool
) -> None:
    one = st.one_of(
        st.integers(0, library.get_vocab_size() - 1),
        st.sampled_from(byte_ids),
        st.sampled_from([0, 1, END]),
    )
    prompt = data.draw(st.lists(one, min_size=1, max_size=12))
    ids = data.draw(st.lists(one, min_size=1, max_size=12))
    params = {"echo": True, "return_token_ids": True, "skip_special_tokens": skip}
    core = DetokenizerCore(real, frozenset({END}))
    answer = run(core, opened(prompt, **params), ids, LENGTH)
    assert answer.text == library.decode([*prompt, *ids], skip_special_tokens=skip)
    assert list(answer.told.token_ids) == [*prompt, *ids]
    assert answer.counts == list(range(1, len(ids) + 1))
    if not skip:
        content = b"".join(answer.told.pieces)
        assert content.decode(errors="replace") == answer.text
        for place, offset in enumerate(answer.told.text_offsets):
            rest = b"".join(answer.told.pieces[: place + 1]).decode(errors="replace")
            assert rest[:offset] == answer.text[:offset] and offset < len(rest)


def test_a_character_may_begin_in_the_prompt_and_end_in_the_answer(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    ids = library.encode("Hi 🫠").ids
    request = opened(ids[:-1], echo=True, return_token_ids=True, stop=["Hi", "never"])
    answer = run(core, request, [*ids[-1:], *library.encode(" ok").ids], LENGTH)
    assert answer.text == "Hi 🫠 ok"
    assert list(answer.told.text_offsets)[-2:] == [3, 4]


def test_stop_strings_do_not_reach_into_an_echoed_prompt(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    prompt, ids = library.encode("one two").ids, library.encode(" one three").ids
    answer = run(core, opened(prompt, echo=True, stop=["two one", "three"]), ids, LENGTH)
    assert answer.text == "one two one "
    assert answer.end == Finished(R, STOP, len(ids), "three")


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_only_the_echo_loses_the_first_space(tmp_path: Path, name: str) -> None:
    core = DetokenizerCore(Decoders(save(tmp_path, SENTENCEPIECE[name])), frozenset())
    half, other = ids_of_bytes("é".encode())
    prompt, ids = [VOCABULARY["▁Hello"], half], [other, VOCABULARY["▁wor"]]
    answer = run(core, opened(prompt, echo=True, return_token_ids=True), ids, LENGTH)
    space = "" if name == "llama" else " "
    assert answer.text == f"{space}Helloé wor"
    end = len(space) + 5
    assert list(answer.told.text_offsets) == [0, end, end, end + 1]
    assert answer.told.pieces == [b" Hello", b"\xc3", b"\xa9", b" wor"]


@pytest.mark.parametrize("finish", [NONE, STOP, LENGTH])
@pytest.mark.parametrize("echo", [False, True])
def test_the_one_token_of_a_computed_prompt_is_nobodys(
    core: DetokenizerCore, library: Tokenizer, echo: bool, finish: FinishReason
) -> None:
    prompt = library.encode("Hello 🫠").ids[:-1]
    request = opened(prompt, max_tokens=0, echo=echo, prompt_logprobs=0, logprobs=0)
    answer = Answer()
    answer.read(core.open(request, SCHEDULER))
    answer.read(core.step(chunk(1, prompt[1:])))
    answer.read(core.step(sampled(len(prompt), END, finish, thought(len(prompt), [END]))))
    assert answer.text == (library.decode(prompt) if echo else "")
    assert answer.end == Finished(R, LENGTH, 0)
    assert list(answer.told.token_ids) == prompt
    assert answer.counts == [0]
    assert len(answer.aborts) == (finish is NONE)  # else the executor knows
    assert core.num_open == 0


@pytest.mark.parametrize("early", [False, True])
def test_an_embedding_comes_with_the_end(core: DetokenizerCore, early: bool) -> None:
    result = sampled(2, 81, LENGTH)
    vector = struct.pack("<3f", 0.0, 0.6, 0.8)
    result.embeddings.append(Embedding(Handle(1), vector))
    request, answer = opened([1, 5], max_tokens=0, embed=True), Answer()
    if early:
        assert core.step(result) == []
    answer.read(core.open(request, SCHEDULER))
    if not early:
        answer.read(core.step(result))
    assert (answer.text, answer.parts) == ("", [])
    assert answer.end == Finished(R, LENGTH, 0, embedding=vector)


def test_an_embedding_that_did_not_come_is_an_error(core: DetokenizerCore) -> None:
    answer = run(core, opened([1], max_tokens=0, embed=True), [81], LENGTH)
    assert answer.end is not None and answer.end.failure is not None
    assert answer.end.failure.status == 500

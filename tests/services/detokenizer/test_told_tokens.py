"""Requests that want to hear of tokens."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.detokenizer import deltas, details
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.decoder import Decoders
from shared.messages import Deltas, Finished, StepResult, TokenDetails
from shared.types import FinishReason, int32s
from tests.services.detokenizer.answers import (
    END,
    LENGTH,
    NONE,
    SCHEDULER,
    STOP,
    Answer,
    R,
    chunk,
    joined,
    opened,
    run,
    sampled,
    thought,
)


def test_tokens_come_with_their_text_and_also_while_it_is_held_back(
    core: DetokenizerCore, real: Decoders, library: Tokenizer
) -> None:
    ids = library.encode("a🫠").ids
    core.open(opened([1, 5], logprobs=1), SCHEDULER)
    text = ""
    for place, one in enumerate(ids):
        [(_, _, message)] = core.step(
            sampled(2 + place, one, logprobs=thought(2 + place, [one], pairs=2))
        )
        assert isinstance(message, Deltas)
        text += message.texts[0]
        assert list(message.token_counts) == [place + 1]
        assert message.details == [
            TokenDetails(
                R,
                position=2 + place,
                token_ids=int32s([one]),
                pieces=[real.pieces[one]],
                text_offsets=int32s([min(place, 1)]),
                ranks=int32s([3 + place]),
                counts=int32s([2]),
                pair_ids=int32s([one, one + 1]),
                pair_pieces=[real.pieces[one], real.pieces[one + 1]],
                values=struct.pack("<2f", -2 - place, -2 - place),
            )
        ]
    assert text == "a🫠"


def test_an_end_token_is_told_behind_all_text(core: DetokenizerCore, library: Tokenizer) -> None:
    """Also behind half a character that has no other half any more."""
    ids = [*library.encode("x🫠").ids[:-1], END]
    answer = run(core, opened([1], return_token_ids=True), ids, STOP)
    assert answer.text == "x\ufffd"
    assert answer.end == Finished(R, STOP, len(ids))
    assert list(answer.told.token_ids) == [1, *ids]
    assert answer.told.pieces[-1] == b"<|im_end|>"
    assert answer.told.text_offsets[-1] == len(answer.text)


def test_tokens_cut_by_a_stop_string_are_told_too(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    ids = library.encode("One two three four").ids
    answer = run(core, opened([1], logprobs=0, stop=["two three"]), ids, LENGTH)
    assert answer.text == "One "
    assert answer.end == Finished(R, STOP, 3, "two three")
    assert list(answer.told.token_ids) == ids[:3]
    assert list(answer.told.text_offsets) == [0, 3, 7]
    assert answer.counts == [1, 2, 3]


def test_a_sampled_token_without_logprobs_is_told_without_them(core: DetokenizerCore) -> None:
    answer = run(core, opened([1], logprobs=3), [81], LENGTH)
    assert list(answer.told.token_ids) == [81]
    assert (list(answer.told.counts), list(answer.told.ranks)) == ([0], [0])
    assert answer.end == Finished(R, LENGTH, 1)


def test_a_prompt_is_told_with_the_first_token(core: DetokenizerCore) -> None:
    """It came in chunks, some before `Open`, some twice."""
    prompt, answer = [1, 5, 6, 7, 8], Answer()
    answer.read(core.step(chunk(1, prompt[1:3])))
    answer.read(core.open(opened(prompt, prompt_logprobs=0), SCHEDULER))
    answer.read(core.step(chunk(1, prompt[1:4])))
    assert answer.parts == []
    answer.read(core.step(sampled(5, 81, logprobs=thought(4, prompt[4:]))))
    assert [part.position for part in answer.parts] == [0, 5]
    assert list(answer.parts[0].token_ids) == prompt
    assert list(answer.parts[0].counts) == [0, 1, 1, 1, 1]
    assert list(answer.parts[0].ranks) == [0, 2, 3, 4, 5]
    assert list(answer.parts[0].pair_ids) == prompt[1:]
    assert answer.parts[0].values == struct.pack("<4f", -1, -2, -3, -4)
    assert list(answer.parts[0].text_offsets) == [0] * 5
    answer.read(core.step(chunk(1, prompt[1:])))  # an executor was lost
    answer.read(core.step(sampled(6, 81, LENGTH)))
    assert list(answer.told.token_ids) == [*prompt, 81, 81]


def test_a_prompt_of_which_logprobs_were_lost_is_an_error(core: DetokenizerCore) -> None:
    answer = Answer()
    answer.read(core.open(opened([1, 5, 6], prompt_logprobs=0), SCHEDULER))
    answer.read(core.step(chunk(2, [6])))
    answer.read(core.step(sampled(3, 81)))
    assert answer.end is not None and answer.end.failure is not None
    assert (answer.end.reason, answer.end.failure.status) == (FinishReason.ERROR, 500)
    assert answer.aborts == [answer.end.failure.message]
    assert core.num_open == 0


def test_only_what_was_asked_is_told(core: DetokenizerCore, library: Tokenizer) -> None:
    ids = library.encode("Hello world").ids
    wishes = [opened([5]), opened([5], logprobs=0), opened([5], return_token_ids=True)]
    answers = [run(core, wish, ids, LENGTH) for wish in wishes]
    told = [[one for part in answer.parts for one in part.token_ids] for answer in answers]
    assert told == [[], ids, [5, *ids]]


def test_what_is_told_of_a_long_prompt_is_spread_over_messages(
    core: DetokenizerCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(details, "MAX_ITEMS", 6)
    monkeypatch.setattr(deltas, "MAX_ITEMS", 6)
    prompt = list(range(10, 20))
    core.open(opened(prompt, prompt_logprobs=0), SCHEDULER)
    core.step(chunk(1, prompt[1:]))
    out = core.step(sampled(10, 81, LENGTH))
    sent = [message for _, _, message in out if isinstance(message, Deltas)]
    assert len(sent) == 4
    assert [message.finished for message in sent] == [[], [], [], [Finished(R, LENGTH, 1)]]
    assert [message.texts for message in sent] == [["a"], [], [], []]
    told = joined([part for message in sent for part in message.details])
    assert list(told.token_ids) == [*prompt, 81]
    assert list(told.counts) == [0, *[1] * 9, 0]


@settings(max_examples=200)
@given(data=st.data(), echo=st.booleans())
def test_what_is_told_does_not_depend_on_when_it_came(
    real: Decoders, data: st.DataObject, echo: bool
) -> None:
    """`Open` may come at any time, and executors may be lost at any time: then the prompt is
    computed again, with what was generated, whose logprobs do not come again."""
    ids = st.lists(st.integers(0, 49151), min_size=1, max_size=6)
    prompt, output = data.draw(ids), data.draw(ids)
    size = len(prompt)
    request = opened(prompt, prompt_logprobs=1, logprobs=1, echo=echo)

    def prefill(cut: int) -> list[StepResult]:
        cut = min(cut, size)
        halves = [(1, prompt[1:cut]), (max(cut, 1), prompt[max(cut, 1) :])]
        return [chunk(first, half) for first, half in halves if half]

    def decode(first: int, last: int) -> list[StepResult]:
        return [
            sampled(
                size + place,
                output[place],
                LENGTH if place == len(output) - 1 else NONE,
                thought(size + place, output[place : place + 1], pairs=2),
            )
            for place in range(first, last)
        ]

    def hear(results: list[StepResult], opening: int) -> Answer:
        core, answer = DetokenizerCore(real, frozenset({END})), Answer()
        for result in results[:opening]:
            answer.read(core.step(result))
        answer.read(core.open(request, SCHEDULER))
        for result in results[opening:]:
            answer.read(core.step(result))
        assert core.num_open == 0
        return answer

    lost = data.draw(st.integers(0, len(output) - 1))
    again = data.draw(st.integers(0, lost))
    results = [
        *prefill(data.draw(st.integers(0, size))),
        *decode(0, lost),
        *prefill(data.draw(st.integers(0, size))),
        *decode(again, len(output)),
    ]
    usual = hear([*prefill(size), *decode(0, len(output))], 0)
    other = hear(results, data.draw(st.integers(0, len(results))))
    assert (other.text, other.told, other.end) == (usual.text, usual.told, usual.end)
    assert list(usual.told.token_ids) == [*prompt, *output]
    assert list(usual.told.counts) == [0, *[1] * (size - 1), *[2] * len(output)]


def test_what_is_noted_far_ahead_of_its_token_is_not_kept(core: DetokenizerCore) -> None:
    """A request holds no more than its prompt's and the next token's."""
    answer = Answer()
    answer.read(core.open(opened([1], logprobs=0), SCHEDULER))
    answer.read(core.step(chunk(2, [81])))
    answer.read(core.step(sampled(1, 81, logprobs=thought(1, [81]))))
    answer.read(core.step(sampled(2, 81, LENGTH)))
    assert list(answer.told.counts) == [1, 0]

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.detokenizer import early
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.decoder import Decoders
from services.detokenizer.outbox import Outgoing
from shared.codec import Identity
from shared.messages import (
    Abort,
    Accepted,
    Deltas,
    Failed,
    Failure,
    Finished,
    Open,
    Recall,
    Recalled,
    Route,
    StepResult,
    Submit,
)
from shared.sampling import SamplingParams
from shared.types import FinishReason, Handle, Incarnation, RequestId, ServiceName, int32s

GATEWAY, SCHEDULER = ServiceName.GATEWAY, ServiceName.SCHEDULER
SCHEDULER_0 = Identity(SCHEDULER, "scheduler.0", Incarnation(7))
REBORN = Identity(SCHEDULER, "scheduler.0", Incarnation(8))
PROMPT = [1, 5, 6]
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")
NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH


def opened(handle: int, gateway: str = "gateway.0", **params: object) -> Open:
    sampling = SamplingParams(seed=1, max_tokens=100, **params)  # type: ignore[arg-type]
    return Open(RequestId(f"r{handle}"), Handle(handle), gateway, int32s(PROMPT), sampling)


def step(
    *rows: tuple[int, int, int, FinishReason], epoch: Incarnation = SCHEDULER_0.incarnation
) -> StepResult:
    """Rows of handle, place in the answer, token id, finish."""
    handles, places, ids, finishes = zip(*rows, strict=True)
    positions = int32s(len(PROMPT) + place for place in places)
    return StepResult(epoch, 1, int32s(handles), positions, int32s(ids), bytes(finishes))


def resumed(number: int, ids: list[int], handle: int | None = None, **params: object) -> Open:
    """Opened anew, with so many tokens of its answer."""
    first = opened(number, **params)  # type: ignore[arg-type]
    return replace(
        first,
        handle=Handle(handle or number),
        token_ids=first.token_ids + int32s(ids),
        output_tokens=len(ids),
    )


def again(number: int, ids: list[int], scheduler: str = "scheduler.0") -> Outgoing:
    """What goes to a scheduler of a request with these tokens."""
    one = resumed(number, ids)
    route = Route("gateway.0", "detokenizer.0")
    submit = Submit(
        one.request_id, one.token_ids, one.params, route, output_tokens=one.output_tokens
    )
    return SCHEDULER, scheduler, submit


def texts(outgoing: Iterable[Outgoing]) -> str:
    """All text in it."""
    found = [message for _, _, message in outgoing if isinstance(message, Deltas)]
    return "".join(text for deltas in found for text in deltas.texts)


def failures(outgoing: Iterable[Outgoing]) -> list[tuple[str, int]]:
    """Request and status of each fault that a gateway is told of."""
    ends = [end for _, _, one in outgoing if isinstance(one, Deltas) for end in one.finished]
    assert all(end.reason is FinishReason.ERROR for end in ends)
    return [(end.request_id, end.failure.status) for end in ends if end.failure is not None]


def test_an_opened_request_is_accepted(core: DetokenizerCore) -> None:
    accepted = Accepted(R1, len(PROMPT), "scheduler.0")
    assert core.open(opened(1), SCHEDULER_0) == [(GATEWAY, "gateway.0", accepted)]
    assert core.num_open == 1


def test_an_iteration_is_one_message_for_each_gateway(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    hello, world = library.encode("Hello world").ids
    for handle, gateway in [(1, "gateway.0"), (2, "gateway.1"), (3, "gateway.0")]:
        core.open(opened(handle, gateway), SCHEDULER_0)
    core.step(step((1, 0, hello, NONE)))
    out = core.step(step((1, 1, world, NONE), (2, 0, hello, LENGTH), (3, 0, hello, NONE)))
    first = Deltas([R1, R3], [" world", "Hello"], int32s([5, 0]), int32s([2, 1]), [])
    second = Deltas([R2], ["Hello"], int32s([0]), int32s([1]), [Finished(R2, LENGTH, 1)])
    assert out == [(GATEWAY, "gateway.0", first), (GATEWAY, "gateway.1", second)]
    assert core.num_open == 2


def test_rows_without_text_are_left_out_and_still_counted(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    ids = library.encode("🫠").ids
    core.open(opened(1), SCHEDULER_0)
    for place, one in enumerate(ids[:-1]):
        assert core.step(step((1, place, one, NONE))) == []
    out = core.step(step((1, len(ids) - 1, ids[-1], NONE)))
    assert out == [
        (GATEWAY, "gateway.0", Deltas([R1], ["🫠"], int32s([0]), int32s([len(ids)]), []))
    ]


def test_a_stop_string_ends_the_request_and_tells_the_scheduler(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    hello, world = library.encode("Hello world").ids
    core.open(opened(1, stop=["wor"]), SCHEDULER_0)
    core.step(step((1, 0, hello, NONE)))
    out = core.step(step((1, 1, world, NONE)))
    end = Finished(R1, STOP, 2, "wor")
    assert out == [
        (GATEWAY, "gateway.0", Deltas([R1], [" "], int32s([5]), int32s([2]), [end])),
        (SCHEDULER, "scheduler.0", Abort(R1, "a stop string was found")),
    ]
    assert core.step(step((1, 2, hello, NONE))) == []  # the iteration that ran meanwhile
    assert (core.num_open, core.counters.late_tokens) == (0, 1)


def test_a_token_that_comes_again_is_dropped(core: DetokenizerCore, library: Tokenizer) -> None:
    hello, world = library.encode("Hello world").ids
    core.open(opened(1), SCHEDULER_0)
    core.step(step((1, 0, hello, NONE)))
    assert core.step(step((1, 0, world, LENGTH))) == []
    assert (core.num_open, core.counters.repeated_tokens) == (1, 1)


def test_a_gap_is_made_up_by_the_scheduler(core: DetokenizerCore, library: Tokenizer) -> None:
    ids = library.encode("One two three four").ids
    core.open(opened(1), SCHEDULER_0)
    core.step(step((1, 0, ids[0], NONE)))
    assert core.step(step((1, 2, ids[2], NONE))) == [again(1, ids[:1])]
    assert core.step(step((1, 3, ids[3], NONE))) == []  # it was asked already
    out = core.open(resumed(1, ids[:3]), SCHEDULER_0)
    assert texts(out) == " two three"
    assert texts(core.step(step((1, 3, ids[3], LENGTH)))) == " four"
    assert (core.num_open, core.counters.late_tokens) == (0, 2)


def test_tokens_that_fit_after_a_gap_close_it(core: DetokenizerCore) -> None:
    core.open(opened(1), SCHEDULER_0)
    assert core.step(step((1, 1, 81, NONE))) == [again(1, [])]
    assert core.step(step((1, 0, 81, NONE)))
    assert core.step(step((1, 2, 81, NONE))) == [again(1, [81])]


def test_tokens_before_their_open_wait_for_it(core: DetokenizerCore, library: Tokenizer) -> None:
    hello, world = library.encode("Hello world").ids
    assert core.step(step((1, 0, hello, NONE), (2, 0, hello, LENGTH))) == []
    assert core.step(step((1, 1, world, NONE))) == []
    first, second = core.open(opened(1), SCHEDULER_0)
    assert isinstance(first[2], Accepted)
    expected = Deltas([R1] * 2, ["Hello", " world"], int32s([0, 5]), int32s([1, 2]), [])
    assert second == (GATEWAY, "gateway.0", expected)
    _, (_, _, end) = core.open(opened(2), SCHEDULER_0)
    assert isinstance(end, Deltas) and end.finished == [Finished(R2, LENGTH, 1)]


def test_early_tokens_behind_a_stop_string_are_dropped(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    hello, world = library.encode("Hello world").ids
    core.step(step((1, 0, hello, NONE), (1, 1, world, NONE)))
    out = core.open(opened(1, stop=["Hell"]), SCHEDULER_0)
    assert [type(message) for _, _, message in out] == [Accepted, Deltas, Abort]
    assert core.counters.late_tokens == 1


def test_early_tokens_that_had_to_go_are_a_gap(
    core: DetokenizerCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "MAX_WAITING", 1)
    core.step(step((1, 0, 81, NONE), (2, 0, 81, NONE)))
    assert core.counters.dropped_early_tokens == 1
    core.open(opened(1), SCHEDULER_0)
    assert core.step(step((1, 1, 81, NONE))) == [again(1, [])]


def test_an_aborted_request_is_forgotten_even_before_it_comes(core: DetokenizerCore) -> None:
    core.open(opened(1), SCHEDULER_0)
    core.abort(R1)
    core.abort(R2)
    core.step(step((1, 0, 81, NONE), (2, 0, 81, NONE)))
    aborted = Abort(R2, "aborted before")
    assert core.open(opened(2), SCHEDULER_0) == [(SCHEDULER, "scheduler.0", aborted)]
    assert core.step(step((1, 1, 81, NONE), (2, 1, 81, NONE))) == []
    assert (core.num_open, core.counters.late_tokens) == (0, 4)


def test_a_failed_request_ends_with_its_failure(core: DetokenizerCore) -> None:
    core.open(opened(1), SCHEDULER_0)
    core.step(step((1, 0, 81, NONE)))
    failure = Failure(500, "poison")
    end = Finished(R1, FinishReason.ERROR, 1, failure=failure)
    out = core.failed(Failed(R1, failure))
    assert out == [(GATEWAY, "gateway.0", Deltas([], [], int32s(), int32s(), [end]))]
    assert core.failed(Failed(R1, failure)) == []


def test_a_lost_schedulers_requests_go_to_another(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    hello, world = library.encode("Hello world").ids
    other = Identity(SCHEDULER, "scheduler.1", Incarnation(9))
    core.open(opened(1), SCHEDULER_0)
    core.step(step((1, 0, hello, NONE)))
    core.open(opened(2), SCHEDULER_0)
    core.open(opened(3), other)
    assert core.scheduler_lost("scheduler.0") == 2
    assert core.scheduler_lost("scheduler.0") == 0
    assert core.resubmit(lambda journal: None) == []
    assert core.resubmit(lambda journal: "scheduler.1") == [
        again(1, [hello], "scheduler.1"),
        again(2, [], "scheduler.1"),
    ]
    assert core.resubmit(lambda journal: "scheduler.1") == []  # once is enough
    out = core.open(resumed(1, [hello], handle=7), other)
    assert out == [(GATEWAY, "gateway.0", Accepted(R1, len(PROMPT), "scheduler.1"))]
    assert (core.num_open, core.num_orphans) == (3, 1)
    assert core.step(step((1, 1, world, NONE))) == []  # what the lost one had run
    out = core.step(step((7, 1, world, LENGTH), epoch=other.incarnation))
    assert texts(out) == " world"


def test_the_next_scheduler_may_be_lost_too(core: DetokenizerCore) -> None:
    core.open(opened(1), SCHEDULER_0)
    core.scheduler_lost("scheduler.0")
    assert core.resubmit(lambda journal: "scheduler.1") == [again(1, [], "scheduler.1")]
    assert core.scheduler_lost("scheduler.1") == 0
    assert core.resubmit(lambda journal: "scheduler.2") == [again(1, [], "scheduler.2")]


def test_orphans_do_not_wait_for_ever(core: DetokenizerCore) -> None:
    core.open(opened(1), SCHEDULER_0)
    core.scheduler_lost("scheduler.0")
    core.resubmit(lambda journal: "scheduler.1")
    assert failures(core.give_up_orphans()) == [("r1", 503)]
    late = core.open(resumed(1, []), REBORN)
    assert late == [(SCHEDULER, "scheduler.0", Abort(R1, "aborted before"))]
    assert (core.num_open, core.num_orphans) == (0, 0)


def test_an_abort_while_orphaned(core: DetokenizerCore) -> None:
    """It may overtake what the next scheduler opens."""
    core.open(opened(1), SCHEDULER_0)
    core.scheduler_lost("scheduler.0")
    core.resubmit(lambda journal: "scheduler.0")
    core.abort(R1)
    assert (core.num_open, core.num_orphans) == (0, 0)
    assert core.open(resumed(1, []), REBORN) == [
        (SCHEDULER, "scheduler.0", Abort(R1, "aborted before"))
    ]
    assert core.num_open == 0


def test_a_reborn_scheduler_knows_nothing_of_its_former_life(core: DetokenizerCore) -> None:
    core.open(opened(5), SCHEDULER_0)
    core.open(opened(1), REBORN)
    assert (core.num_open, core.num_orphans) == (2, 1)
    assert core.step(step((5, 0, 81, NONE))) == []
    assert len(core.step(step((1, 0, 81, NONE), epoch=REBORN.incarnation))) == 1
    assert core.resubmit(lambda journal: "scheduler.0") == [again(5, [])]


def test_a_recall_is_answered_with_all_of_that_life(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    hello, world = library.encode("Hello world").ids
    other = Identity(SCHEDULER, "scheduler.1", Incarnation(9))
    core.open(opened(1), SCHEDULER_0)
    core.open(opened(2), SCHEDULER_0)
    core.open(opened(3), other)
    core.step(step((1, 0, hello, NONE), (2, 0, hello, LENGTH)))
    assert core.recall(Recall(4), SCHEDULER_0) == [
        again(1, [hello]),
        (SCHEDULER, "scheduler.0", Recalled(4)),
    ]
    out = core.step(step((1, 0, hello, NONE), (1, 1, world, NONE)))
    assert texts(out) == " world"
    assert core.counters.repeated_tokens == 1


def test_an_abort_while_recalled(core: DetokenizerCore) -> None:
    """The scheduler may have forgotten the request, and take it anew."""
    core.open(opened(1), SCHEDULER_0)
    core.recall(Recall(1), SCHEDULER_0)
    core.abort(R1)
    assert core.open(resumed(1, [], handle=2), SCHEDULER_0) == [
        (SCHEDULER, "scheduler.0", Abort(R1, "aborted before"))
    ]


def test_what_another_had_is_told_from_its_beginning(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    """The gateway knows how much of that its client has."""
    hello, world, *rest = library.encode("Hello world, how").ids
    accepted, (_, _, deltas) = core.open(resumed(1, [hello, world]), SCHEDULER_0)
    assert accepted == (GATEWAY, "gateway.0", Accepted(R1, len(PROMPT), "scheduler.0"))
    assert isinstance(deltas, Deltas)
    assert (deltas.texts, list(deltas.offsets)) == (["Hello", " world"], [0, 5])
    assert texts(core.step(step((1, 2, rest[0], LENGTH)))) == ","


def test_a_stop_string_may_lie_in_what_another_had(
    core: DetokenizerCore, library: Tokenizer
) -> None:
    ids = library.encode("Hello world, how").ids
    out = core.open(resumed(1, ids, stop=["wor"]), SCHEDULER_0)
    assert texts(out) == "Hello "
    assert out[-1] == (SCHEDULER, "scheduler.0", Abort(R1, "a stop string was found"))


def test_a_lost_gateway_takes_its_requests_along(core: DetokenizerCore) -> None:
    core.open(opened(1), SCHEDULER_0)
    core.open(opened(2, "gateway.1"), SCHEDULER_0)
    abort = Abort(R1, "the gateway was lost")
    assert core.gateway_lost("gateway.0") == [(SCHEDULER, "scheduler.0", abort)]
    assert core.num_open == 1


@dataclass
class Reader:
    """A gateway: checks that what it gets fits together."""

    texts: dict[str, str] = field(default_factory=dict)
    ends: dict[str, Finished] = field(default_factory=dict)

    def read(self, outgoing: Iterable[Outgoing]) -> None:
        for _, _, message in outgoing:
            if isinstance(message, Accepted):
                assert message.request_id not in self.texts
                self.texts[message.request_id] = ""
            elif isinstance(message, Deltas):
                self._read_deltas(message)

    def _read_deltas(self, deltas: Deltas) -> None:
        for request_id, text, offset in zip(
            deltas.request_ids, deltas.texts, deltas.offsets, strict=True
        ):
            assert text and offset == len(self.texts[request_id])
            assert request_id not in self.ends
            self.texts[request_id] += text
        for end in deltas.finished:
            assert end.request_id not in self.ends
            self.ends[end.request_id] = end


@settings(max_examples=200)
@given(data=st.data())
def test_messages_may_cross_in_any_order(
    real: Decoders, library: Tokenizer, data: st.DataObject
) -> None:
    """Each sender's messages come in order, but those of different senders as they please.

    The executor may have died and repeat the tokens from an earlier place.
    """
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    answers = {
        handle: data.draw(st.lists(st.integers(0, 49151), min_size=size, max_size=size))
        for handle, size in enumerate(lengths, start=1)
    }
    aborted = data.draw(st.sets(st.sampled_from(sorted(answers))))
    core, reader = DetokenizerCore(real, frozenset({2})), Reader()

    def rows(place: int) -> list[tuple[int, int, int, FinishReason]]:
        return [
            (handle, place, ids[place], LENGTH if place == len(ids) - 1 else NONE)
            for handle, ids in answers.items()
            if place < len(ids)
        ]

    order = list(range(max(lengths)))
    for _ in range(data.draw(st.integers(0, 2))):
        again = data.draw(st.integers(0, len(order) - 1))
        order[again:again] = order[data.draw(st.integers(0, again)) : again]
    scheduler = [lambda h=h: reader.read(core.open(opened(h), SCHEDULER_0)) for h in answers]
    executor = [lambda p=place: reader.read(core.step(step(*rows(p)))) for place in order]
    gateway = [lambda h=h: core.abort(RequestId(f"r{h}")) for h in sorted(aborted)]
    streams = [stream for stream in (scheduler, executor, gateway) if stream]
    while streams:
        stream = data.draw(st.sampled_from(streams))
        stream.pop(0)()
        streams = [one for one in streams if one]

    assert core.num_open == 0
    for handle, ids in answers.items():
        name, text = f"r{handle}", library.decode(ids)
        assert text.startswith(reader.texts.get(name, ""))
        if handle not in aborted:
            assert reader.texts[name] == text
            assert reader.ends[name] == Finished(RequestId(name), LENGTH, len(ids))

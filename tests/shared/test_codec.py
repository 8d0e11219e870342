"""Any message survives the wire; anything else is a BadFrame and nothing worse."""

from __future__ import annotations

import math
import struct
import types
from array import array
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bounds import INT32_MAX, AtMost, Within
from shared.codec import (
    BOUNDS,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    MAX_NAME,
    VERSION,
    BadFrame,
    Identity,
    decode,
    encode,
)
from shared.messages import (
    REGISTRY,
    Abort,
    Announce,
    Decoded,
    Deltas,
    Embedding,
    Failure,
    Finished,
    Generate,
    Logprobs,
    Message,
    Open,
    Plan,
    Prompt,
    Refused,
    Route,
    StepResult,
    Submit,
    TokenDetails,
)
from shared.sampling import SamplingParams
from shared.types import FinishReason, Incarnation, Int32s, RequestId, ServiceName, int32s

SENDER = Identity(ServiceName.GATEWAY, "gateway.0", Incarnation(7))
LONGEST_REASON = 300  # characters: it is logged, and the frame is a stranger's

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
columns = st.lists(int32, max_size=4).map(int32s)
ids = st.integers(0, INT32_MAX)
floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=2).map(
    lambda values: struct.pack(f"<{len(values)}f", *values)
)


def column_of(size: int, items: st.SearchStrategy[int] = int32) -> st.SearchStrategy[Int32s]:
    return st.lists(items, min_size=size, max_size=size).map(int32s)


def bounded(hint: Any, bound: Within | AtMost) -> st.SearchStrategy[Any]:
    """Values of a type that a bound allows."""
    if isinstance(bound, AtMost):
        return strategy_of(hint).filter(lambda value: len(value) <= bound.length)
    if hint is float:
        return st.floats(bound.least, bound.most)
    return st.integers(int(bound.least), int(bound.most))


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if hint in BOUNDS:
        return bounded(hint.__supertype__, BOUNDS[hint])
    if isinstance(hint, NewType):
        return strategy_of(hint.__supertype__)
    if get_origin(hint) is Annotated:
        return bounded(*get_args(hint))
    if hint is array:
        return columns
    if get_origin(hint) is list:
        return st.lists(strategy_of(get_args(hint)[0]), max_size=2)
    if get_origin(hint) in (types.UnionType, Union):
        return st.one_of([strategy_of(option) for option in get_args(hint)])
    if is_dataclass(hint) and isinstance(hint, type):
        return SPECIAL[hint]() if hint in SPECIAL else fieldwise(hint)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return st.sampled_from(hint)
    plain = {
        int: int64,
        str: st.text(max_size=20),
        bool: st.booleans(),
        bytes: st.binary(max_size=4),
        types.NoneType: st.none(),
        float: st.floats(allow_nan=False, allow_infinity=False),
    }
    return plain[hint]


def fieldwise(kind: type[Any], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]
    return st.builds(kind, **{n: strategy_of(hints[n]) for n in names if n not in given} | given)


def prompts() -> st.SearchStrategy[Prompt]:
    contents = {"text": st.text(), "token_ids": columns, "chat": st.text()}
    return st.one_of(
        [
            st.builds(
                Prompt,
                add_special_tokens=st.booleans(),
                truncate_to=st.none() | st.integers(-(2**63), 2**63 - 1),
                chat_template=st.none() | st.text(),
                **{name: content},
            )
            for name, content in contents.items()
        ]
    )


@st.composite
def resumed(draw: st.DrawFn, kind: type[Any], generated: st.SearchStrategy[Any]) -> Any:
    """A message with tokens of which some were generated."""
    count = draw(generated)
    tokens = draw(st.lists(ids, min_size=count or 0, max_size=4).map(int32s))
    return draw(fieldwise(kind, token_ids=st.just(tokens), output_tokens=st.just(count)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    rows, grants = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    counts = draw(st.lists(st.integers(0, 3), min_size=grants, max_size=grants))
    given = {name: column_of(rows) for name in ("row_slots", "row_starts", "row_tokens")}
    given |= {"block_slots": column_of(grants), "block_counts": st.just(int32s(counts))}
    plan: Plan = draw(fieldwise(Plan, block_ids=column_of(sum(counts)), **given))
    return plan


@st.composite
def step_results(draw: st.DrawFn) -> StepResult:
    rows = draw(st.integers(0, 3))
    given = {name: column_of(rows, ids) for name in ("handles", "positions", "token_ids")}
    finishes = st.lists(st.sampled_from(FinishReason), min_size=rows, max_size=rows).map(bytes)
    result: StepResult = draw(fieldwise(StepResult, finishes=finishes, **given))
    return result


def pairs(draw: st.DrawFn, entries: int) -> tuple[Int32s, int]:
    """Counts of pairs, and their sum."""
    counts = draw(st.lists(st.integers(0, 3), min_size=entries, max_size=entries))
    return int32s(counts), sum(counts)


@st.composite
def logprobs(draw: st.DrawFn) -> Logprobs:
    entries = draw(st.integers(0, 3))
    counts, total = pairs(draw, entries)
    given = {name: column_of(entries) for name in ("handles", "positions", "ranks")}
    given |= {"counts": st.just(counts), "token_ids": column_of(total)}
    values = st.just(bytes(4 * total))
    found: Logprobs = draw(fieldwise(Logprobs, values=values, **given))
    return found


@st.composite
def token_details(draw: st.DrawFn) -> TokenDetails:
    entries = draw(st.integers(0, 3))
    counts, total = pairs(draw, entries)
    given: dict[str, st.SearchStrategy[Any]] = {
        name: column_of(entries) for name in ("token_ids", "text_offsets", "ranks")
    }
    given |= {"counts": st.just(counts), "pair_ids": column_of(total)}
    for name, size in (("pieces", entries), ("pair_pieces", total)):
        given[name] = st.lists(st.binary(max_size=4), min_size=size, max_size=size)
    values = st.just(bytes(4 * total))
    found: TokenDetails = draw(fieldwise(TokenDetails, values=values, **given))
    return found


@st.composite
def deltas(draw: st.DrawFn) -> Deltas:
    rows = draw(st.integers(0, 3))
    words = st.lists(st.text(max_size=5), min_size=rows, max_size=rows)
    given = {"request_ids": words, "texts": words}
    counts = {"offsets": column_of(rows), "token_counts": column_of(rows)}
    message: Deltas = draw(fieldwise(Deltas, **given, **counts))
    return message


SPECIAL: dict[type, Callable[[], st.SearchStrategy[Any]]] = {
    Prompt: prompts,
    Plan: plans,
    Open: lambda: resumed(Open, st.integers(0, 4)),
    Submit: lambda: resumed(Submit, st.none() | st.integers(0, 4)),
    StepResult: step_results,
    Deltas: deltas,
    Embedding: lambda: fieldwise(Embedding, vector=floats),
    Finished: lambda: fieldwise(Finished, embedding=floats),
    Logprobs: logprobs,
    TokenDetails: token_details,
}
messages: st.SearchStrategy[Message] = st.one_of([strategy_of(kind) for kind in REGISTRY.values()])
senders = st.builds(Identity, st.sampled_from(ServiceName), st.text(max_size=9), int64)
values = st.recursive(  # all that msgpack can say
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.datetimes().map(lambda when: msgpack.Timestamp(int(when.year), 1))
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def decode_or_refuse(frame: bytes) -> None:
    """Decode; what passes must be a message that has this frame's meaning, so encode again."""
    try:
        message, sender, sent = decode(frame)
    except BadFrame as error:
        assert len(str(error)) <= LONGEST_REASON
    else:
        again = encode(message, sender, sent)
        assert encode(*decode(again)) == again


def parts_of(message: Message) -> list[Any]:
    parts: list[Any] = msgpack.unpackb(encode(message, SENDER))
    return parts


@pytest.mark.parametrize("kind", REGISTRY.values(), ids=lambda kind: kind.__name__)
def test_each_message_survives_the_wire(kind: type[Message]) -> None:
    @settings(max_examples=40)
    @given(message=strategy_of(kind), sender=senders, sent=int64)
    def round_trip(message: Message, sender: Identity, sent: int) -> None:
        assert decode(encode(message, sender, sent)) == (message, sender, sent)

    round_trip()


def test_a_column_of_ids_costs_four_bytes_each() -> None:
    short, long = (
        encode(StepResult(Incarnation(1), 1, ids, ids, ids, bytes(len(ids))), SENDER)
        for ids in (int32s(range(1000)), int32s(range(2000)))
    )
    assert len(long) - len(short) == 1000 * (3 * 4 + 1)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    decode_or_refuse(frame)


@given(values)
def test_random_msgpack_is_refused(value: Any) -> None:
    frame: bytes = msgpack.packb(value)
    decode_or_refuse(frame)


@settings(max_examples=300)
@given(message=messages, data=st.data())
def test_a_field_of_any_other_value_is_refused_or_means_itself(
    message: Message, data: st.DataObject
) -> None:
    parts = parts_of(message)
    place = data.draw(st.sampled_from([parts, parts[6] or parts]))
    index = data.draw(st.integers(0, len(place) - 1))
    place[index] = data.draw(values)
    decode_or_refuse(msgpack.packb(parts))


@settings(max_examples=300)
@given(message=messages, data=st.data())
def test_mutated_frames_are_refused_or_mean_something(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(encode(message, SENDER))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(frame)))
        end = data.draw(st.integers(start, min(len(frame), start + 8)))
        frame[start:end] = data.draw(st.binary(max_size=8))
    decode_or_refuse(bytes(frame))


@given(message=messages, data=st.data())
def test_truncated_and_extended_frames_are_refused(message: Message, data: st.DataObject) -> None:
    frame = encode(message, SENDER)
    with pytest.raises(BadFrame):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(BadFrame):
        decode(frame + data.draw(st.binary(min_size=1, max_size=9)))


@given(message=messages, data=st.data())
def test_a_missing_or_an_extra_field_is_refused(message: Message, data: st.DataObject) -> None:
    for place in (0, 1):
        parts = parts_of(message)
        changed = [parts, parts[6]][place]
        if not changed or data.draw(st.booleans()):
            changed.insert(data.draw(st.integers(0, len(changed))), None)
        else:
            del changed[data.draw(st.integers(0, len(changed) - 1))]
        with pytest.raises(BadFrame):
            decode(msgpack.packb(parts))


ABORT = parts_of(Abort(RequestId("r1"), "why"))
NONE = int32s()
PLAN = parts_of(Plan(1, NONE, [], NONE, NONE, NONE, NONE, NONE, NONE))
RESULT = parts_of(StepResult(Incarnation(1), 1, int32s(), int32s(), int32s(), b""))
ONE = int32s([1])
ROW = parts_of(StepResult(Incarnation(1), 1, ONE, ONE, ONE, b"\0"))
REFUSED = parts_of(Refused(RequestId("r1"), Failure(400, "no")))
GENERATE = parts_of(
    Generate(RequestId("r1"), Prompt(text="hi"), SamplingParams(seed=0), Route("g", "d"))
)


@pytest.mark.parametrize(
    ("parts", "path", "value"),
    [
        (ABORT, (0,), VERSION + 1),
        (ABORT, (0,), True),  # equals 1
        (ABORT, (0,), 1.0),
        (ABORT, (0,), "v" * 100_000),
        (ABORT, (1,), 0),
        (ABORT, (1,), len(REGISTRY) + 1),
        (ABORT, (1,), "10"),
        (ABORT, (1,), [10]),
        (ABORT, (2,), "router"),
        (ABORT, (2,), None),
        (ABORT, (3,), "g" * (MAX_NAME + 1)),
        (ABORT, (3,), b"gateway.0"),
        (ABORT, (4,), 2**63),
        (ABORT, (4,), False),
        (ABORT, (5,), -1.0),
        (ABORT, (5,), 2**63),
        (ABORT, (6,), {"request_id": "r1", "reason": "why"}),
        (ABORT, (6, 0), 1),
        (ABORT, (6, 1), None),
        (ABORT, (6, 0), "r" * 129),
        (ABORT, (6, 1), "x" * 65537),
        (PLAN, (6, 0), True),  # a bool is no step
        (PLAN, (6, 0), -1),
        (PLAN, (6, 0), 1.0),
        (PLAN, (6, 0), 2**63),
        (PLAN, (6, 0), -(2**63) + 0.0),
        (PLAN, (6, 1), [1, 2]),  # ids travel as bytes
        (PLAN, (6, 1), b"123"),  # no whole int32
        (PLAN, (6, 2), b""),
        (PLAN, (6, 4), b"\1\0\0\0"),  # a count without its slot
        (PLAN, (6, 5), b"\1\0\0\0"),  # a block that nobody gets
        (PLAN, (6, 6), b"\1\0\0\0"),  # a row without start and count
        (RESULT, (6, 2), b"\1\0\0\0"),
        (RESULT, (6, 5), b"\1"),
        (RESULT, (6, 5), ""),
        (GENERATE, (6, 2, 0), -1),  # a seed
        (GENERATE, (6, 2, 1), math.nan),
        (GENERATE, (6, 2, 1), math.inf),
        (GENERATE, (6, 2, 1), -0.1),
        (GENERATE, (6, 2, 2), 1.1),
        (GENERATE, (6, 2, 5), 2**31),  # max_tokens
        (GENERATE, (6, 2, 6), -1),
        (GENERATE, (6, 2, 9), ["x" * 16385]),
        (GENERATE, (6, 2, 9), ["x"] * 1025),
        (GENERATE, (6, 2, 20), 1001),  # logprobs
        (GENERATE, (6, 3, 0), "g" * 256),
        (ROW, (6, 3), b"\xff\xff\xff\xff"),  # negative
        (ROW, (6, 4), b"\xff\xff\xff\xff"),
        (ROW, (6, 5), b"\5"),  # no FinishReason
        (ROW, (6, 7), [b"\1\0\0\0"] * 5 + [struct.pack("<f", math.nan)]),
        (ROW, (6, 8), [[1, struct.pack("<f", math.inf)]]),
        (ROW, (6, 8), [[1, b"123"]]),
        (ROW, (6, 8), [[-1, b""]]),  # a handle
        (ROW, (6, 8), [[2**31, b""]]),
        (REFUSED, (6, 1, 0), 200),
        (REFUSED, (6, 1, 0), 2**40),
    ],
)
def test_each_deviation_is_refused(parts: list[Any], path: tuple[int, ...], value: Any) -> None:
    frame: bytes = msgpack.packb(parts)
    decode(frame)
    parts = msgpack.unpackb(frame)
    place = parts
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(BadFrame) as refusal:
        decode(msgpack.packb(parts))
    assert len(str(refusal.value)) <= LONGEST_REASON


@pytest.mark.parametrize("size", [f.name for f in fields(Announce)][1:-1])
def test_an_executor_that_holds_nothing_is_refused(size: str) -> None:
    parts = parts_of(Announce("f", 1, 1, 1, 1, 1, 1))
    parts[6][[f.name for f in fields(Announce)].index(size)] = 0
    with pytest.raises(BadFrame):
        decode(msgpack.packb(parts))


def _nested(items: int) -> bytes:
    """Lists in a list, more than so many items in all, of one byte each."""
    return (
        b"\xdd"
        + (items // 1000 + 1).to_bytes(4, "big")
        + ((b"\xdc" + (1000).to_bytes(2, "big") + b"\xc0" * 1000) * (items // 1000 + 1))
    )


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91" * 100_000,  # nested too deep for any parser
        b"\x97\x02\x0a" + b"\x81\xa1k" * 50_000,
        b"\xdd\xff\xff\xff\xff",  # 4 G items announced
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff\x00",
        b"\xdb\xff\xff\xff\xff\x00",
        b"\xc9\xff\xff\xff\xff\x01\x00",
        b"\xa2\xff\xfe",  # no UTF-8
        b"\xc1",  # never used by msgpack
        b"\x81\x90\x00",  # a key that cannot be hashed
        b"\x80",  # a map
        b"\x97" * 7 + b"\xdd\x00\x10\x00\x00" * 400,  # each with room for a million
        b"\x97\x07\x0a\xa7gateway\xa1g\x01\x00" + _nested(MAX_ITEMS),
        msgpack.packb(msgpack.Timestamp(1, 1)),
        msgpack.packb(msgpack.ExtType(5, b"x" * 100)),
        msgpack.packb([VERSION, 10, "gateway", "g", 1, 0, msgpack.ExtType(5, b"")]),
        msgpack.packb([VERSION, 10, "gateway", "g", 1, 0, [msgpack.Timestamp(1), "why"]]),
        msgpack.packb([VERSION, 10, "gateway", "g", 1, 0, ["r1", "why"]]).replace(
            b"why", b"\xff\0\0"
        ),
        msgpack.packb(None) * 6,
    ],
    ids=lambda frame: frame[:8].hex(),
)
def test_hostile_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(frame)


def test_an_oversized_frame_is_refused_unread() -> None:
    frame = encode(Decoded(RequestId("r1"), "x" * (MAX_FRAME_BYTES - 100)), SENDER)
    assert decode(frame)
    with pytest.raises(BadFrame, match="over"):
        decode(frame + bytes(100))

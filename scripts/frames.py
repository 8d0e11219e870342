"""Frames for attacks on inboxes: valid messages of every kind, and what becomes of them.

All is drawn from one source of chance, so a seed makes the same frames again.
"""

from __future__ import annotations

import functools
import struct
import types
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import IntEnum
from random import Random
from typing import Annotated, Any, NewType, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from shared.bounds import AtMost, Within
from shared.codec import MAX_ITEMS, Identity, encode
from shared.directions import DIRECTIONS
from shared.messages import (
    REGISTRY,
    Deltas,
    Embedding,
    EnteringSequence,
    Logprobs,
    Message,
    Open,
    Plan,
    Prompt,
    StepResult,
    Submit,
    TokenDetails,
)
from shared.sampling import Grammar, GrammarKind
from shared.types import FinishReason, Incarnation, Int32s, ServiceName, int32s

Pools = Mapping[str, Callable[[], Sequence[Any]]]  # by a field's name: values worth trying

NAMES = ("gateway.0", "tokenizer.0", "scheduler.0", "model-executor.0", "detokenizer.0", "no.1")
TEXTS = ("", "hi", "The mill", "\x00\u202e\U0001f3ad", "{}", '{"messages": [{"role": "user"}]}')
NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 16, 17, 63, 64, 255, 256, 1000, 49151, 49152, -1, -2, -1000),
    *(2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
    *(-(2**31), -(2**31) - 1, -(2**63)),
)
INT32S = tuple(number for number in NUMBERS if -(2**31) <= number < 2**31)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, -1e300, float("nan"), float("inf"))
OTHERS: tuple[Any, ...] = (
    *(None, True, 1.5, "x", b"x", b"", [], [[]], -5),
    *([None] * 9, "x" * 70_000, b"\xff" * 4096),
)
HOSTILE = (
    b"",
    b"\xc1",
    b"\x91" * 5000,
    b"\x97" * 7 + b"\xdd\x00\x10\x00\x00" * 200,
    b"\xdd" + MAX_ITEMS.to_bytes(4, "big") + b"\x90" * 4096,
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff\x00",
    b"\xc9\xff\xff\xff\xff\x01\x00",
    b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    b"GET / HTTP/1.1\r\n\r\n",
)


class Forge:
    """Makes frames for one service; `senders` are those it may claim to be from."""

    def __init__(
        self,
        random: Random,
        receiver: ServiceName,
        senders: Sequence[Identity] = (),
        pools: Pools | None = None,
        *,
        impostors: bool = True,
        vocabulary: int = 1000,
    ) -> None:
        """`impostors`: headers may bear the names of members, whose links are cut by that.

        vocabulary: ids of tokens are below it, but for those that are spoilt.
        """
        self._random = random
        self._pools = dict(pools or {})
        self._senders = list(senders)
        self._vocabulary = vocabulary
        self._only: type[Message] | None = None
        self._names = (*(NAMES if impostors else ()), "nobody.9", "x" * 300)
        self._expected = [
            kind for kind, ways in DIRECTIONS.items() if any(receiver is to for _, to in ways)
        ]
        self._from = {
            kind: [who for who, to in ways if to is receiver] for kind, ways in DIRECTIONS.items()
        }

    def frame(self, kind: type[Message] | None = None) -> bytes:
        """One frame, more or less wrong; of this kind if one is given."""
        self._only = kind
        acts: dict[Callable[[], bytes], int] = {
            self._nonsense: 8,
            self._valid: 6,
            self._misshapen: 3,
            self._cut: 2,
            self._mislabelled: 1,
            self._noise: 1,
        }
        (act,) = self._random.choices(list(acts), list(acts.values()))
        return act()

    # --- what is done to messages

    def _valid(self) -> bytes:
        return encode(*self._said())

    def _nonsense(self) -> bytes:
        """Values of the right types that make no sense."""
        parts = self._parts()
        for _ in range(self._random.choice((1, 1, 2, 4))):
            place, index = self._place(parts[6])
            if place is not None:
                place[index] = self._alike(place[index])
        return _packed(parts)

    def _misshapen(self) -> bytes:
        """Values of other types, and fields that are missing or too many."""
        parts, random = self._parts(), self._random
        place, index = self._place(parts)
        assert place is not None
        act = random.randrange(4)
        if act == 0:
            place[index] = random.choice(OTHERS)
        elif act == 1:
            del place[index]
        elif act == 2:
            place.insert(index, random.choice(OTHERS))
        else:
            place[index] = [place[index]] * random.choice((0, 1, 2, 100))
        return _packed(parts)

    def _cut(self) -> bytes:
        """Bytes turned, cut, put in or put behind."""
        random = self._random
        frame = bytearray(encode(*self._said()))
        for _ in range(random.choice((1, 1, 2, 8))):
            start = random.randrange(len(frame) + 1)
            end = min(len(frame), start + random.choice((0, 1, 1, 1, 4, len(frame))))
            frame[start:end] = random.randbytes(random.choice((0, 1, 1, 4, 64)))
        return bytes(frame)

    def _mislabelled(self) -> bytes:
        """A header that is wrong in one place."""
        random, parts = self._random, self._parts()
        index = random.randrange(6)
        wrong: list[Any] = [
            random.choice(NUMBERS),
            random.randrange(40),
            random.choice([*map(str, ServiceName), "router"]),
            random.choice(self._names),
            random.choice((0, 1, random.getrandbits(63))),
            random.choice(NUMBERS),
        ]
        parts[index] = wrong[index]
        if index == 4:  # an impostor of nobody: one of a peer would cut the link to it
            parts[3] = "nobody.9"
        return _packed(parts)

    def _noise(self) -> bytes:
        random = self._random
        if random.random() < 0.5:
            return random.choice(HOSTILE)
        return random.randbytes(random.choice((1, 4, 16, 64, 1024)))

    def _said(self) -> tuple[Message, Identity]:
        """A valid message and who says it: mostly one that comes this way."""
        random = self._random
        usual = random.random() < 0.95
        kind = self._only or random.choice(self._expected if usual else list(REGISTRY.values()))
        claimed = self._from.get(kind) or list(ServiceName)
        senders = [one for one in self._senders if one.service in claimed]
        if not senders or random.random() < 0.2:
            service = random.choice(claimed)
            senders = [Identity(service, f"{service}.9", Incarnation(random.getrandbits(62)))]
        return self.message(kind), random.choice(senders)

    def _parts(self) -> list[Any]:
        parts: list[Any] = msgpack.unpackb(encode(*self._said()))
        return parts

    def _place(self, tree: list[Any]) -> tuple[list[Any] | None, int]:
        """A place in a tree of lists: all that hold something are as likely."""
        holders = [tree] if tree else []
        for holder in holders:
            holders += [item for item in holder if isinstance(item, list) and item]
        if not holders:
            return None, 0
        holder = self._random.choice(holders)
        return holder, self._random.randrange(len(holder))

    def _alike(self, value: Any) -> Any:
        """Another value of the same wire type."""
        random = self._random
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return random.choice((value + 1, value - 1, -value, random.choice(NUMBERS)))
        if isinstance(value, float):
            return random.choice(FLOATS)
        if isinstance(value, str):
            return random.choice((*TEXTS, *NAMES, value + "x", "x" * 5000))
        if isinstance(value, bytes):
            return self._other_bytes(value)
        if isinstance(value, list):
            return random.choice(([], value * 2, value[:-1], value * 50))
        return random.choice((0, -1, 1, "", 2**40))  # where nothing was

    def _other_bytes(self, value: bytes) -> bytes:
        """Columns of ids mostly: other items, more or fewer of them, or parts of one."""
        random = self._random
        column = [number for (number,) in struct.iter_unpack("<i", value[: len(value) // 4 * 4])]
        act = random.randrange(5)
        if act == 0 or not column:
            return value + random.randbytes(random.choice((1, 4, 8)))
        if act == 1:
            return value[: random.randrange(len(value) + 1)]
        if act == 2:
            return value * random.choice((2, 100))
        column[random.randrange(len(column))] = random.choice(INT32S)
        if act == 3:
            column = [random.choice(INT32S) for _ in column]
        return struct.pack(f"<{len(column)}i", *column)

    # --- valid messages

    def message(self, kind: type[Message]) -> Message:
        made: Message = self._made(kind)
        return made

    def _made(self, kind: type[Any]) -> Any:
        if kind in SPECIAL:
            return SPECIAL[kind](self)
        return self._fieldwise(kind)

    def _fieldwise(self, kind: type[Any], **given: Any) -> Any:
        hints = _hints(cast(Hashable, kind))
        names = [field.name for field in fields(kind) if field.name not in given]
        return kind(**{name: self._value(hints[name], name) for name in names}, **given)

    def _value(self, hint: Any, name: str) -> Any:
        random = self._random
        pool = self._pools.get(name)
        values = pool() if pool is not None else ()
        if values and random.random() < 0.9:
            return random.choice(values)
        if isinstance(hint, NewType):
            return self._value(hint.__supertype__, name)
        origin = get_origin(hint)
        if origin is Annotated:
            return self._bounded(name, *get_args(hint))
        if origin in (types.UnionType, Union):
            return self._value(random.choice(get_args(hint)), name)
        if origin is list:
            return [self._value(get_args(hint)[0], name) for _ in range(random.choice((0, 1, 2)))]
        if is_dataclass(hint) and isinstance(hint, type):
            return self._made(hint)
        if isinstance(hint, type) and issubclass(hint, IntEnum):
            return random.choice(list(hint))
        plain: dict[Any, Callable[[], Any]] = {
            types.NoneType: lambda: None,
            array: lambda: self._ids(random.choice((0, 1, 3, 20))),
            bool: lambda: random.random() < 0.3,
            int: lambda: random.choice((0, 1, 2, 5)),
            float: lambda: random.choice((0.0, 0.3, 1.0)),
            str: lambda: f"{name}{random.randrange(8)}",
            bytes: lambda: b"",
        }
        return plain[hint]()

    def _bounded(self, name: str, inner: Any, bound: Within | AtMost) -> Any:
        value = self._value(inner, name)
        if isinstance(bound, Within) and value is not None:
            return min(max(value, type(value)(bound.least)), type(value)(bound.most))
        return value

    def _ids(self, count: int) -> Int32s:
        return int32s(self._random.randrange(self._vocabulary) for _ in range(count))

    def _handles(self, count: int) -> Int32s:
        pool = self._pools.get("handle", lambda: range(8))() or range(8)
        return int32s(self._random.choice(pool) for _ in range(count))

    def _positions(self, count: int) -> Int32s:
        pool = self._pools.get("position", lambda: range(24))() or range(24)
        return int32s(self._random.choice(pool) for _ in range(count))

    def _prompt(self) -> Prompt:
        kind = self._random.randrange(3)
        if kind == 0:
            return Prompt(text=self._random.choice(TEXTS))
        if kind == 1:
            return Prompt(chat=self._random.choice(TEXTS))
        return Prompt(token_ids=self._ids(self._random.randrange(6)))

    def _grammar(self) -> Grammar:
        return Grammar(GrammarKind.REGEX, self._random.choice(("[a-z]+", "(", "a{1,9}", "")))

    def _opened(self, kind: type[Open] | type[Submit]) -> Open | Submit:
        tokens = self._ids(self._random.choice((1, 5, 20)))
        opened: Open | Submit = self._fieldwise(
            kind, token_ids=tokens, output_tokens=self._random.randrange(len(tokens) + 1)
        )
        if isinstance(opened, Submit) and self._random.random() < 0.5:
            return replace(opened, output_tokens=None)
        return opened

    def _entering(self) -> EnteringSequence:
        tokens = self._ids(self._random.choice((1, 5, 20)))
        made: EnteringSequence = self._fieldwise(
            EnteringSequence,
            slot=self._random.choice(self._pools.get("slot", lambda: ())() or range(4)),
            token_ids=tokens,
            prompt_tokens=len(tokens),
        )
        return made

    def _plan(self) -> Plan:
        """One that fits now and then: a few sequences enter, get blocks and are run."""
        random = self._random
        taken = self._pools.get("taken", lambda: ())()
        entering = [self._entering() for _ in range(random.choice((0, 0, 0, 1) if taken else (1,)))]
        slots = int32s(one.slot for one in entering) or int32s(taken)
        tokens = [len(one.token_ids) for one in entering] or [1 for _ in slots]
        counts = int32s(count // 4 + random.choice((0, 1, 1)) for count in tokens)
        plan: Plan = self._fieldwise(
            Plan,
            retired=int32s(taken[:1] if entering and random.random() < 0.3 else ()),
            entering=entering,
            block_slots=slots,
            block_counts=counts,
            block_ids=int32s(random.randrange(16) for _ in range(sum(counts))),
            row_slots=slots,
            row_starts=int32s(0 if entering else -1 for _ in slots),
            row_tokens=int32s(tokens),
            lease=random.choice((0, 0, 3, 64)),
            jump=random.choice((0, 8)),
        )
        return plan

    def _step_result(self) -> StepResult:
        rows = self._random.choice((0, 1, 1, 3))
        result: StepResult = self._fieldwise(
            StepResult,
            handles=self._handles(rows),
            positions=self._positions(rows),
            token_ids=self._ids(rows),
            finishes=bytes(self._random.choice(list(FinishReason)) for _ in range(rows)),
        )
        return result

    def _logprobs(self) -> Logprobs:
        rows = self._random.choice((1, 2))
        counts = int32s(self._random.randrange(3) for _ in range(rows))
        total = sum(counts)
        return Logprobs(
            self._handles(rows),
            self._positions(rows),
            self._ids(rows),
            counts,
            self._ids(total),
            struct.pack(f"<{total}f", *[-0.5] * total),
        )

    def _details(self) -> TokenDetails:
        rows = self._random.choice((1, 2))
        none = int32s()
        made: TokenDetails = self._fieldwise(
            TokenDetails,
            token_ids=self._ids(rows),
            pieces=[b"a"] * rows,
            text_offsets=self._ids(rows),
            ranks=self._ids(rows),
            counts=int32s([0] * rows),
            pair_ids=none,
            pair_pieces=[],
            values=b"",
        )
        return made

    def _deltas(self) -> Deltas:
        rows = self._random.choice((0, 1, 2))
        deltas: Deltas = self._fieldwise(
            Deltas,
            request_ids=[self._value(str, "request_id") for _ in range(rows)],
            texts=[self._random.choice(TEXTS) for _ in range(rows)],
            offsets=int32s(self._random.choice((0, 1)) for _ in range(rows)),
            token_counts=int32s(self._random.choice((0, 1)) for _ in range(rows)),
        )
        return deltas


SPECIAL: dict[type[Any], Callable[[Forge], Any]] = {
    Prompt: Forge._prompt,
    Grammar: Forge._grammar,
    Open: lambda forge: forge._opened(Open),
    Submit: lambda forge: forge._opened(Submit),
    EnteringSequence: Forge._entering,
    Plan: Forge._plan,
    StepResult: Forge._step_result,
    Logprobs: Forge._logprobs,
    TokenDetails: Forge._details,
    Deltas: Forge._deltas,
    Embedding: lambda forge: forge._fieldwise(Embedding, vector=struct.pack("<2f", 0.6, 0.8)),
}


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(cast(type, kind), include_extras=True)


def _packed(parts: list[Any]) -> bytes:
    try:
        frame: bytes = msgpack.packb(parts)
    except OverflowError:  # beyond what msgpack can say
        return b"\x97" + b"\xcf\xff" * 20
    return frame

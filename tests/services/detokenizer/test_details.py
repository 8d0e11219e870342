from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer import details
from services.detokenizer.decoder import TokenBytes
from services.detokenizer.details import Entry, Teller, entries
from shared.messages import Logprobs, TokenDetails
from shared.types import int32s
from tests.services.detokenizer.answers import R, joined

PIECES = TokenBytes(lambda token_id: b"<%d>" % token_id)


def entry(position: int, *pairs: tuple[int, float], rank: int = 1) -> Entry:
    ids, values = zip(*pairs, strict=True) if pairs else ((), ())
    return Entry(position, rank, int32s(ids), struct.pack(f"<{len(values)}f", *values))


ENTRIES = st.lists(
    st.one_of(
        st.none(),
        st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 0, width=32)), max_size=4),
    ),
    min_size=1,
    max_size=12,
)


def test_entries_are_taken_apart() -> None:
    values = struct.pack("<3f", -1, -2, -3)
    columns = int32s([7, 8, 7]), int32s([1, 5, 2]), int32s([4, 1, 9]), int32s([2, 0, 1])
    assert list(entries(Logprobs(*columns, int32s([10, 11, 12]), values))) == [
        (7, entry(1, (10, -1), (11, -2), rank=4)),
        (8, entry(5, rank=1)),
        (7, entry(2, (12, -3), rank=9)),
    ]


def test_tokens_are_told_with_what_was_noted_of_them() -> None:
    teller = Teller(R, PIECES, 1)
    teller.note(entry(2, (6, -1.5), (9, -0.5), rank=2))
    teller.tell(int32s([5, 6]), int32s([0, 3]))
    assert teller.claim() == [
        TokenDetails(
            R,
            position=1,
            token_ids=int32s([5, 6]),
            pieces=[b"<5>", b"<6>"],
            text_offsets=int32s([0, 3]),
            ranks=int32s([0, 2]),
            counts=int32s([0, 2]),
            pair_ids=int32s([6, 9]),
            pair_pieces=[b"<6>", b"<9>"],
            values=struct.pack("<2f", -1.5, -0.5),
        )
    ]
    assert teller.claim() == []
    teller.note(entry(2, (6, -1.5)))  # computed again
    assert not teller.knows(range(2, 3))


@given(known=ENTRIES, data=st.data())
def test_how_tokens_are_batched_makes_no_difference(
    known: list[list[tuple[int, float]] | None], data: st.DataObject
) -> None:
    """And no message gets longer than allowed, unless a token alone is."""
    size = data.draw(st.integers(1, 12))
    ids = int32s(range(20, 20 + len(known)))
    offsets = int32s(range(len(known)))

    def told(sizes: list[int]) -> list[TokenDetails]:
        teller, at = Teller(R, PIECES, 0), 0
        for position, pairs in enumerate(known):
            if pairs is not None:
                teller.note(entry(position, *pairs))
        for size in sizes:
            teller.tell(ids[at : at + size], offsets[at : at + size])
            at += size
        return teller.claim()

    cuts = sorted(data.draw(st.sets(st.integers(1, len(known)))) | {len(known)})
    sizes = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
    [whole] = told([len(known)])
    assert joined(told(sizes)) == joined(told([1] * len(known))) == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(details, "MAX_ITEMS", size)
        parts = told([len(known)])
    assert joined(parts) == whole
    for part in parts:
        assert len(part.token_ids) == 1 or len(part.token_ids) + len(part.pair_ids) <= size

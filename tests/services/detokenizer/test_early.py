from __future__ import annotations

import pytest

from services.detokenizer import early
from services.detokenizer.details import Entry
from services.detokenizer.early import EarlyTokens, Item, Row
from shared import tombstones
from shared.messages import Embedding
from shared.types import Handle, Incarnation, RequestId, int32s

EPOCH, OTHER = Incarnation(1), Incarnation(2)


def test_tokens_wait_for_their_own_request_in_order() -> None:
    tokens = EarlyTokens()
    rows = [Row(place, 10 + place, 0) for place in range(3)]
    for row in rows:
        tokens.keep(EPOCH, Handle(1), row)
        tokens.keep(OTHER, Handle(1), Row(0, 99, 0))
    assert tokens.claim(EPOCH, Handle(2)) == []
    assert tokens.claim(EPOCH, Handle(1)) == rows
    assert tokens.claim(EPOCH, Handle(1)) == []
    assert tokens.size == 3


def test_tokens_are_bounded_and_the_oldest_request_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MAX_WAITING", 3)
    tokens = EarlyTokens()
    handles = [1, 1, 2, 3]
    dropped = [tokens.keep(EPOCH, Handle(one), Row(0, 0, 0)) for one in handles]
    assert dropped == [0, 0, 0, 2]
    assert tokens.size == 2
    assert tokens.claim(EPOCH, Handle(1)) == []
    assert len(tokens.claim(EPOCH, Handle(2))) == 1


def test_what_comes_beside_tokens_waits_in_its_place_and_is_bounded_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early, "MAX_WAITING", 3)
    tokens = EarlyTokens()
    items: list[Item] = [
        Entry(0, 1, int32s(), b""),
        Row(0, 9, 0),
        Embedding(Handle(1), b"abcd"),
    ]
    assert [tokens.keep(EPOCH, Handle(1), item) for item in items] == [0, 0, 0]
    assert tokens.claim(EPOCH, Handle(1)) == items
    for item in items:
        tokens.keep(EPOCH, Handle(1), item)
    assert tokens.keep(EPOCH, Handle(2), items[0]) == 1  # of three that went, one is a token
    assert tokens.size == 1


def test_aborts_are_claimed_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "LIMIT", 2)
    aborts = tombstones.Tombstones()
    for name in "abc":
        aborts.bury(RequestId(name))
    claimed = [aborts.claim(RequestId(name)) for name in "abccd"]
    assert claimed == [False, True, True, False, False]


def test_what_is_large_counts_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MAX_WAITING", 100)
    tokens = EarlyTokens()
    for number in range(50):
        large = Entry(0, 1, int32s(range(1000)), bytes(4000))
        tokens.keep(EPOCH, Handle(number), large)
        assert sum(len(item.values) for item in _entries(tokens)) <= 100 * early.LARGE_BYTES
    assert tokens.claim(EPOCH, Handle(49))
    for number in range(50):
        tokens.claim(EPOCH, Handle(number))
    assert tokens.size == 0


def _entries(tokens: EarlyTokens) -> list[Entry]:
    kept = [item for items in tokens._items.values() for item in items]
    return [item for item in kept if isinstance(item, Entry)]

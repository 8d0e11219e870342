"""The heap whose items can be removed or ranked anew."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.lazy_heap import SLACK, LazyHeap

changes = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "pop"]), st.integers(0, 9), st.integers(0, 5)),
    max_size=60,
)


@settings(deadline=None)
@given(changes)
def test_the_first_is_the_smallest_that_is_there(changes: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int, int] = LazyHeap()
    model: dict[int, int] = {}  # in the order in which they were ranked
    for kind, item, rank in changes:
        if kind == "put":
            heap.put(item, rank)
            model.pop(item, None)
            model[item] = rank
        elif kind == "remove" and item in model:
            heap.remove(item)
            del model[item]
        elif kind == "pop" and model:
            first = min(model, key=model.__getitem__)
            assert heap.first == first
            heap.remove(first)
            del model[first]
        assert len(heap) == len(model)
        if model:
            assert heap.first == min(model, key=model.__getitem__)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 99)), min_size=100, max_size=300))
def test_the_order_survives_a_tidy_up(puts: list[tuple[int, int]]) -> None:
    heap: LazyHeap[int, int] = LazyHeap()
    for item, rank in puts:
        heap.put(item, rank)
    ranks = dict(puts)
    drained = []
    while heap:
        drained.append(ranks[heap.first])
        heap.remove(heap.first)
    assert drained == sorted(ranks.values())


def test_what_is_not_there_cannot_be_had() -> None:
    heap: LazyHeap[str, int] = LazyHeap()
    with pytest.raises(IndexError):
        heap.first  # noqa: B018 - a property
    with pytest.raises(KeyError):
        heap.remove("a")


def test_stale_entries_do_not_pile_up() -> None:
    heap: LazyHeap[str, int] = LazyHeap()
    heap.put("top", 0)
    for number in range(1000):
        heap.put("below", number + 1)
        if number % 3 == 0:
            heap.remove("below")
        assert len(heap._entries) <= 2 * len(heap) + SLACK
    assert heap.first == "top"

"""The pure parts that the core is made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.blocks import BlockPool
from services.scheduler.sequence import NO_SLOT, Sequence
from services.scheduler.tombstones import LIMIT, Tombstones
from services.scheduler.waiting import WaitingQueue
from shared.sampling import SamplingParams
from shared.types import Handle, RequestId, int32s
from tests.services.scheduler.core_bench import ROUTE


def sequence(handle: int = 1, prompt: int = 5, max_tokens: int = 4) -> Sequence:
    return Sequence(
        request_id=RequestId(f"r{handle}"),
        handle=Handle(handle),
        route=ROUTE,
        asked=SamplingParams(seed=1),
        max_tokens=max_tokens,
        token_ids=int32s(range(prompt)),
        arrived=0.0,
    )


@given(st.integers(1, 50), st.lists(st.integers(1, 10), max_size=20))
def test_a_block_is_free_or_taken_never_both(size: int, wishes: list[int]) -> None:
    pool = BlockPool(size)
    taken: list[list[int]] = []
    for wish in wishes:
        if wish <= pool.num_free:
            taken.append(pool.take(wish))
        elif taken:
            pool.give_back(taken.pop(0))
        held = [block for blocks in taken for block in blocks]
        assert len(set(held)) == len(held) == size - pool.num_free
        assert set(held) <= set(range(size))
        assert pool.usage == pytest.approx(len(held) / size)


def test_more_blocks_than_are_free_are_not_handed_out() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        pool.take(3)
    assert pool.num_free == 2


def test_those_put_back_youngest_first_stand_in_front_in_order() -> None:
    queue = WaitingQueue()
    assert not queue
    one, two, three, four = (sequence(handle) for handle in range(1, 5))
    queue.append(three)
    queue.append(four)
    for victim in (two, one):
        queue.put_back(victim)
    order = []
    while queue:
        order.append(queue.first)
        queue.remove(queue.first)
    assert order == [one, two, three, four]


def test_anyone_can_leave_the_queue() -> None:
    queue = WaitingQueue()
    sequences = [sequence(handle) for handle in range(1, 4)]
    for one in sequences:
        queue.append(one)
    queue.remove(sequences[1])
    assert len(queue) == 2
    assert queue.first is sequences[0]


def test_a_tombstone_is_claimed_once_and_the_oldest_is_forgotten() -> None:
    stones = Tombstones()
    assert not stones.claim(RequestId("a"))
    stones.bury(RequestId("a"))
    stones.bury(RequestId("a"))
    assert stones.claim(RequestId("a"))
    assert not stones.claim(RequestId("a"))
    for number in range(LIMIT + 1):
        stones.bury(RequestId(str(number)))
    assert not stones.claim(RequestId("0"))
    assert stones.claim(RequestId("1"))


def test_a_sequence_computes_all_tokens_but_its_last() -> None:
    one = sequence(prompt=5, max_tokens=4)
    assert (one.num_tokens, one.num_inputs, one.num_pending) == (5, 8, 5)
    assert (one.decoding, one.running, one.slot) == (False, False, NO_SLOT)
    one.num_computed, one.num_tokens = 5, 6
    assert (one.decoding, one.num_pending) == (True, 1)
    one.num_computed, one.num_tokens = 8, 9
    assert one.num_pending == 0
    one.limit(10)
    assert (one.num_inputs, one.num_pending, one.params.max_tokens) == (14, 1, 10)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_are_whole(tokens: int, blocks: int) -> None:
    one = sequence()
    assert one.blocks_needed(tokens, block_size=4) == blocks
    one.blocks = [7]
    assert one.blocks_needed(tokens, block_size=4) == blocks - 1

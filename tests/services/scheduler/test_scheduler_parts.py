"""The pure parts that the core is made of."""

from __future__ import annotations

import pytest

from services.scheduler.sequence import NO_SLOT, Sequence
from shared.sampling import SamplingParams
from shared.tombstones import LIMIT, Tombstones
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

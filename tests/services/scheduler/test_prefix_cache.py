"""The block pool with prefix caching, case by case."""

from __future__ import annotations

import pytest

from services.scheduler.hashing import Digest, HashChain, chain_root
from services.scheduler.prefix_cache import CachingBlockPool, PrefixCacheStats
from shared.types import int32s

BLOCK_SIZE = 4


def digests(num_blocks: int, cache_salt: str = "") -> list[Digest]:
    chain = HashChain(chain_root("model", cache_salt=cache_salt), BLOCK_SIZE)
    chain.extend(int32s(range(num_blocks * BLOCK_SIZE)))
    return chain.digests


def computed(pool: CachingBlockPool, contents: list[Digest]) -> list[int]:
    """The block table of a sequence that computed all this by itself."""
    blocks = pool.take(len(contents))
    for block, digest in zip(blocks, contents, strict=True):
        pool.register(block, digest)
    return blocks


def test_it_hands_out_every_block_once() -> None:
    pool = CachingBlockPool(5)
    blocks = pool.take(2) + pool.take(3)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.usage) == (0, 1.0)
    with pytest.raises(ValueError, match="1 blocks asked for, 0 free"):
        pool.take(1)
    pool.give_back(blocks)
    assert (pool.num_free, pool.usage) == (5, 0.0)


def test_what_was_computed_is_found_while_in_use_and_afterwards() -> None:
    pool, contents = CachingBlockPool(4), digests(2)
    blocks = computed(pool, contents)
    assert pool.lookup(contents) == blocks
    pool.give_back(blocks)
    assert pool.num_free == 4
    assert pool.lookup(contents) == blocks


def test_what_was_not_registered_is_not_found() -> None:
    pool, contents = CachingBlockPool(4), digests(3)
    blocks = pool.take(3)
    pool.register(blocks[0], contents[0])
    pool.register(blocks[2], contents[2])
    pool.give_back(blocks)
    assert pool.lookup(contents) == blocks[:1]


def test_another_salt_finds_nothing() -> None:
    pool = CachingBlockPool(4)
    computed(pool, digests(2, "alice"))
    assert pool.lookup(digests(2, "bob")) == []
    assert pool.lookup(digests(2)) == []


def test_shared_blocks_are_free_when_the_last_has_given_them_back() -> None:
    pool, contents = CachingBlockPool(4), digests(2)
    mine = computed(pool, contents)
    theirs = pool.lookup(contents)
    assert pool.count_free(theirs) == 0
    pool.acquire(theirs)
    pool.give_back(mine)
    assert pool.num_free == 2
    pool.give_back(theirs)
    assert pool.num_free == 4


def test_a_found_block_that_is_free_counts_until_it_is_acquired() -> None:
    pool, contents = CachingBlockPool(4), digests(3)
    pool.give_back(computed(pool, contents))
    found = pool.lookup(contents[:2])
    assert (pool.count_free(found), pool.num_free) == (2, 4)
    pool.acquire(found)
    assert (pool.count_free(found), pool.num_free) == (0, 2)


def test_an_acquired_block_is_not_evicted() -> None:
    pool, contents = CachingBlockPool(3), digests(2)
    pool.give_back(computed(pool, contents))
    found = pool.lookup(contents[:1])
    pool.acquire(found)
    assert not set(pool.take(2)) & set(found)
    assert pool.lookup(contents) == found


def test_blank_blocks_go_before_cached_ones() -> None:
    pool, contents = CachingBlockPool(4), digests(2)
    blocks = computed(pool, contents)
    private = pool.take(1)
    pool.give_back(blocks)
    pool.give_back(private)
    pool.take(2)
    assert pool.lookup(contents) == blocks
    assert pool.stats.evictions == 0


def test_the_tail_is_evicted_before_the_head() -> None:
    pool, contents = CachingBlockPool(3), digests(3)
    blocks = computed(pool, contents)
    pool.give_back(blocks)
    for left in (2, 1, 0):
        assert pool.take(1) == [blocks[left]]
        assert pool.lookup(contents) == blocks[:left]
    assert pool.stats.evictions == 3


def test_the_sequence_that_ended_first_is_evicted_first() -> None:
    pool = CachingBlockPool(4)
    old, new = digests(2, "old"), digests(2, "new")
    old_blocks, new_blocks = computed(pool, old), computed(pool, new)
    pool.give_back(old_blocks)
    pool.give_back(new_blocks)
    pool.acquire(pool.lookup(old))  # used once more, so it is the younger now
    pool.give_back(old_blocks)
    assert pool.take(2) == list(reversed(new_blocks))
    assert pool.lookup(old) == old_blocks


def test_an_evicted_block_is_found_under_its_new_content_only() -> None:
    pool, old, new = CachingBlockPool(1), digests(1, "old"), digests(1, "new")
    pool.give_back(computed(pool, old))
    blocks = computed(pool, new)
    assert pool.lookup(old) == []
    assert pool.lookup(new) == blocks


def test_two_that_compute_the_same_keep_their_own_and_leave_one_copy() -> None:
    pool, contents = CachingBlockPool(4), digests(2)
    mine, theirs = computed(pool, contents), computed(pool, contents)
    assert not set(mine) & set(theirs)
    assert pool.lookup(contents) == mine
    pool.give_back(mine)
    pool.give_back(theirs)
    assert pool.lookup(contents) == mine
    pool.take(2)
    assert pool.lookup(contents) == mine  # the copies were blank
    assert pool.stats.evictions == 0


def test_a_copy_takes_the_place_of_what_was_evicted() -> None:
    pool, contents = CachingBlockPool(4), digests(2)
    mine, theirs = computed(pool, contents), computed(pool, contents)
    pool.give_back(mine)
    pool.take(2)
    assert pool.lookup(contents) == []
    pool.give_back(theirs)
    assert pool.lookup(contents) == theirs


def test_a_copy_that_is_given_back_keeps_the_known_block_young() -> None:
    pool = CachingBlockPool(3)
    twice, once = digests(1, "twice"), digests(1, "once")
    known, copy, other = computed(pool, twice), computed(pool, twice), computed(pool, once)
    for blocks in (known, other, copy):
        pool.give_back(blocks)
    assert pool.take(2) == copy + other
    assert pool.lookup(twice) == known


def test_a_wholly_cached_prompt_computes_its_last_block_again() -> None:
    pool, prompt = CachingBlockPool(4), int32s(range(2 * BLOCK_SIZE))
    chain = HashChain(chain_root("model"), BLOCK_SIZE)
    chain.extend(prompt)
    pool.give_back(computed(pool, chain.digests))
    found = pool.lookup(chain.reusable(len(prompt)))
    assert len(found) == 1
    pool.acquire(found)
    own = pool.take(1)
    pool.register(own[0], chain.digests[1])
    pool.give_back(found + own)
    assert pool.num_free == 4
    assert len(pool.lookup(chain.digests)) == 2


def test_misuse_is_refused() -> None:
    pool, contents = CachingBlockPool(2), digests(2)
    blocks = pool.take(1)
    pool.register(blocks[0], contents[0])
    with pytest.raises(ValueError, match="cannot be registered"):
        pool.register(blocks[0], contents[1])
    pool.give_back(blocks)
    with pytest.raises(ValueError, match="free already"):
        pool.give_back(blocks)
    with pytest.raises(ValueError, match="cannot be registered"):
        pool.register(blocks[0], contents[0])


def test_the_totals_outlive_the_pool() -> None:
    stats = PrefixCacheStats()
    for _ in range(2):
        pool = CachingBlockPool(1, stats)
        pool.give_back(computed(pool, digests(1)))
        pool.take(1)
    assert stats.evictions == 2

"""Digests of blocks: what they depend on, and that they grow with a sequence."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.hashing import DIGEST_SIZE, Digest, HashChain, chain_root
from shared.types import int32s

ROOT = chain_root("model")
token_lists = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
block_sizes = st.integers(1, 7)


def digests(tokens: list[int], block_size: int, root: Digest = ROOT) -> list[Digest]:
    chain = HashChain(root, block_size)
    chain.extend(int32s(tokens))
    return chain.digests


@settings(deadline=None)
@given(token_lists, block_sizes, st.lists(st.integers(0, 40)))
def test_growing_in_steps_gives_what_hashing_at_once_does(
    tokens: list[int], block_size: int, lengths: list[int]
) -> None:
    chain = HashChain(ROOT, block_size)
    for length in sorted(lengths):
        chain.extend(int32s(tokens[:length]))
        assert len(chain.digests) == min(length, len(tokens)) // block_size
    chain.extend(int32s(tokens))
    assert chain.digests == digests(tokens, block_size)


@settings(deadline=None)
@given(token_lists, token_lists, block_sizes)
def test_two_sequences_share_just_the_blocks_of_their_common_prefix(
    one: list[int], other: list[int], block_size: int
) -> None:
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    mine, theirs = digests(one, block_size), digests(other, block_size)
    shared = common // block_size
    assert mine[:shared] == theirs[:shared]
    assert not set(mine[shared:]) & set(theirs)


def test_a_block_counts_with_its_place() -> None:
    first, second = digests([5, 6, 5, 6], 2)
    assert first != second


def test_no_two_roots_share_a_block() -> None:
    roots = [
        ROOT,
        chain_root("other"),
        chain_root("model", adapter="x"),
        chain_root("model", cache_salt="x"),
        chain_root("model", content=b"x"),
        chain_root("modelx"),
        chain_root("model", adapter="xy"),
        chain_root("model", adapter="x", cache_salt="y"),
        chain_root("model", cache_salt="\ud800"),  # JSON can carry it
    ]
    chains = [digests([1, 2, 3, 4], 2, root) for root in roots]
    assert len({digest for chain in chains for digest in chain}) == 2 * len(roots)


def test_the_digest_is_the_same_in_every_process() -> None:
    first, second = digests([1, 2, -1, 70000], 2)
    assert first.hex() == "87727e632ed576733b022a575a1a7a1a"
    assert second.hex() == "ee01e9af26e16510394fb808b19d847a"
    assert len(first) == DIGEST_SIZE


@settings(deadline=None)
@given(st.integers(1, 40), block_sizes)
def test_the_last_token_is_never_reusable(num_tokens: int, block_size: int) -> None:
    chain = HashChain(ROOT, block_size)
    chain.extend(int32s(range(40)))
    held = len(chain.reusable(num_tokens)) * block_size
    assert num_tokens - block_size <= held < num_tokens

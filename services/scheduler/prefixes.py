"""Which blocks sequences share: found at their admission, registered as their results come in."""

from __future__ import annotations

from services.scheduler.hashing import HashChain, chain_root
from services.scheduler.prefix_cache import CachingBlockPool
from services.scheduler.sequence import Sequence
from shared.messages import Announce

NEVER = 1 << 62  # tokens


class Prefixes:
    """Knows sequences by their content, for the blocks of one executor."""

    def __init__(self, capacity: Announce, pool: CachingBlockPool, *, enabled: bool) -> None:
        self._fingerprint = capacity.fingerprint
        self._pool = pool
        self._enabled = enabled
        self.block_size = capacity.block_size if enabled else NEVER  # tokens that can be shared

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks that hold its beginning; takes none of them."""
        if not self._enabled or sequence.asked.prompt_logprobs is not None:
            return []  # what is to be told of a prompt's tokens comes of computing them
        digests = self._chain(sequence).reusable(sequence.num_tokens)
        return self._pool.lookup(digests)

    def register(self, sequence: Sequence, num_computed: int) -> None:
        """Let others find its blocks, as far as results have confirmed their tokens."""
        digests = self._chain(sequence).digests
        full = num_computed // self.block_size
        for index in range(sequence.num_registered, full):
            self._pool.register(sequence.blocks[index], digests[index])
        sequence.num_registered = full

    def _chain(self, sequence: Sequence) -> HashChain:
        """With all tokens that are known."""
        chain = sequence.chain
        if chain is None or chain.block_size != self.block_size:
            root = chain_root(self._fingerprint, cache_salt=sequence.cache_salt)
            chain = sequence.chain = HashChain(root, self.block_size)
        chain.extend(sequence.token_ids)
        return chain

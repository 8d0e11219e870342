"""Names for the content of KV blocks: a digest stands for a block and all that comes before it.

digest of block i = blake2b-128(digest of block i-1, the block's token ids as little-endian int32)

The KV of a token depends on all tokens before it, on the weights and on what else was attended
to; so a chain starts from a root that names all this, and equal digests mean equal KV.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeAlias

from shared.types import Int32s, int32s_to_bytes

Digest: TypeAlias = bytes

DIGEST_SIZE = 16  # bytes
TOKEN_SIZE = 4  # bytes


def chain_root(
    fingerprint: str, *, adapter: str = "", content: bytes = b"", cache_salt: str = ""
) -> Digest:
    """What the first block of a chain hangs on: chains of different roots never share a block.

    `fingerprint` is that of model and dtype, `adapter` names adapter and version, `content`
    identifies images and the like, `cache_salt` is the client's wish to share with nobody else.
    """
    texts = (fingerprint, adapter, cache_salt)
    parts = [content, *(text.encode(errors="surrogatepass") for text in texts)]
    hasher = blake2b(digest_size=DIGEST_SIZE, person=b"headrace root")
    for part in parts:  # the lengths keep one part from passing as another
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


class HashChain:
    """The digests of one sequence's full blocks, as far as they were asked for."""

    __slots__ = ("_root", "block_size", "digests")

    def __init__(self, root: Digest, block_size: int) -> None:
        self._root = root
        self.block_size = block_size  # tokens
        self.digests: list[Digest] = []

    def extend(self, token_ids: Int32s) -> None:
        """Hash the blocks that became full; `token_ids` are those of before and any number more."""
        start = len(self.digests) * self.block_size
        end = len(token_ids) - len(token_ids) % self.block_size
        if end <= start:
            return
        raw = int32s_to_bytes(token_ids[start:end])
        width = self.block_size * TOKEN_SIZE
        digest = self.digests[-1] if self.digests else self._root
        for at in range(0, len(raw), width):
            digest = blake2b(digest + raw[at : at + width], digest_size=DIGEST_SIZE).digest()
            self.digests.append(digest)

    def reusable(self, num_tokens: int) -> list[Digest]:
        """Digests of the blocks that need not be computed for the first `num_tokens` tokens.

        The last token is always computed, since the next one is sampled from its logits.
        """
        return self.digests[: (num_tokens - 1) // self.block_size]

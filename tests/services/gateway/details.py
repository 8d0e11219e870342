"""Tokens as a detokenizer tells of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import TokenDetails
from shared.types import RequestId, int32s

Pair = tuple[int, bytes, float]  # id, bytes and logprob


@dataclass(frozen=True, slots=True)
class Spoken:
    """One token: itself, then its alternatives; without a logprob if `pairs` is empty."""

    id: int
    piece: bytes
    offset: int = 0
    rank: int = 0
    pairs: Sequence[Pair] = ()


def details(tokens: Sequence[Spoken], position: int, request_id: str = "x") -> TokenDetails:
    """`position` is that of the first."""
    pairs = [pair for token in tokens for pair in token.pairs]
    return TokenDetails(
        request_id=RequestId(request_id),
        position=position,
        token_ids=int32s(token.id for token in tokens),
        pieces=[token.piece for token in tokens],
        text_offsets=int32s(token.offset for token in tokens),
        ranks=int32s(token.rank for token in tokens),
        counts=int32s(len(token.pairs) for token in tokens),
        pair_ids=int32s(pair[0] for pair in pairs),
        pair_pieces=[pair[1] for pair in pairs],
        values=struct.pack(f"<{len(pairs)}f", *(pair[2] for pair in pairs)),
    )

"""The tokens behind a text, for clients that want to hear of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from shared.messages import TokenDetails

# A prompt with its alternatives can be hundreds of thousands: named tuples, and read in a thread.


class Alternative(NamedTuple):
    """A token that could have stood at a place."""

    id: int
    piece: bytes  # its bytes: perhaps only a part of a character
    logprob: float


class Token(NamedTuple):
    """A token of a prompt or an answer."""

    id: int
    piece: bytes
    position: int  # in its sequence; the prompt's first is 0
    text_offset: int  # characters of the answer before it
    logprob: float | None  # None: not asked for, or the first of a prompt
    rank: int  # among all tokens by likelihood, from 1; 0 if there is no logprob
    top: list[Alternative]  # the likeliest ones, in falling order


class Span(NamedTuple):
    """Consecutive tokens, not read yet."""

    details: TokenDetails
    known: int  # so many of the first are known already


def read_tokens(spans: Iterable[Span]) -> list[Token]:
    return [token for span in spans for token in _read(span.details)[span.known :]]


def _read(details: TokenDetails) -> list[Token]:
    """One Token for each entry."""
    values = struct.unpack(f"<{len(details.pair_ids)}f", details.values)
    pairs = list(map(Alternative, details.pair_ids, details.pair_pieces, values))
    tokens, at = [], 0
    for row, count in enumerate(details.counts):
        own = pairs[at : at + count]
        tokens.append(
            Token(
                id=details.token_ids[row],
                piece=details.pieces[row],
                position=details.position + row,
                text_offset=details.text_offsets[row],
                logprob=own[0].logprob if own else None,
                rank=details.ranks[row],
                top=own[1:],
            )
        )
        at += count
    return tokens

"""What is told of tokens beside their text: ids, bytes, places and logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shared.messages import FLOAT_BYTES, Logprobs, TokenDetails
from shared.types import Handle, Int32s, RequestId, int32s

MAX_ITEMS = 2**18  # tokens and pairs of one message: of 20 bytes or so, far below a frame's bound


class Entry(NamedTuple):
    """What the model thought of one token."""

    position: int
    rank: int
    token_ids: Int32s
    values: bytes


def entries(logprobs: Logprobs) -> Iterator[tuple[Handle, Entry]]:
    """Each entry of an iteration, and whose it is."""
    begin = 0
    for handle, position, rank, count in zip(
        logprobs.handles, logprobs.positions, logprobs.ranks, logprobs.counts, strict=True
    ):
        end = begin + count
        values = logprobs.values[begin * FLOAT_BYTES : end * FLOAT_BYTES]
        yield Handle(handle), Entry(position, rank, logprobs.token_ids[begin:end], values)
        begin = end


class Teller:
    """Describes the tokens of one request in their order, each once.

    Positions: [0, next_position)  described
               [next_position, ..) `_entries`, until their tokens come
    A token whose entry never came is described without pairs.
    """

    __slots__ = ("_details", "_entries", "_pieces", "_request_id", "next_position")

    def __init__(self, request_id: RequestId, pieces: Mapping[int, bytes], position: int) -> None:
        """Begins with the token at `position`; `pieces` has the bytes of any id."""
        self.next_position = position
        self._request_id = request_id
        self._pieces = pieces
        self._entries: dict[int, Entry] = {}
        self._details: list[TokenDetails] = []

    def note(self, entry: Entry) -> None:
        """Keep what will be told with its token; a repeat of what was told is dropped."""
        if entry.position >= self.next_position:
            self._entries[entry.position] = entry

    def knows(self, positions: range) -> bool:
        """Whether there is an entry for each."""
        return all(position in self._entries for position in positions)

    def tell(self, token_ids: Int32s, text_offsets: Int32s) -> None:
        """Describe the next tokens, all in one unless they are too many for a message."""
        start = self.next_position
        self.next_position = end = start + len(token_ids)
        found = [self._entries.pop(position, None) for position in range(start, end)]
        widest = max((len(entry.token_ids) for entry in found if entry is not None), default=0)
        size = max(1, MAX_ITEMS // (1 + widest))
        for place in range(0, len(token_ids), size):
            part = slice(place, place + size)
            details = self._describe(
                start + place, token_ids[part], text_offsets[part], found[part]
            )
            self._details.append(details)

    def claim(self) -> list[TokenDetails]:
        """What was described since the last time."""
        details, self._details = self._details, []
        return details

    def _describe(
        self,
        position: int,
        token_ids: Int32s,
        text_offsets: Int32s,
        found: Sequence[Entry | None],
    ) -> TokenDetails:
        pieces = self._pieces
        pair_ids = int32s()
        for entry in found:
            if entry is not None:
                pair_ids.extend(entry.token_ids)
        return TokenDetails(
            request_id=self._request_id,
            position=position,
            token_ids=token_ids,
            pieces=[pieces[one] for one in token_ids],
            text_offsets=text_offsets,
            ranks=int32s(0 if entry is None else entry.rank for entry in found),
            counts=int32s(0 if entry is None else len(entry.token_ids) for entry in found),
            pair_ids=pair_ids,
            pair_pieces=[pieces[one] for one in pair_ids],
            values=b"".join(entry.values for entry in found if entry is not None),
        )

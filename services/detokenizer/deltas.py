"""One gateway's share of an iteration, gathered row by row."""

from __future__ import annotations

from services.detokenizer.details import MAX_ITEMS
from services.detokenizer.journal import Journal
from shared.messages import Deltas, Finished, TokenDetails
from shared.types import RequestId, int32s


class DeltaColumns:
    """Becomes one `Deltas` message, or several where the details of prompts are too long."""

    __slots__ = (
        "_counts",
        "_details",
        "_finished",
        "_full",
        "_items",
        "_offsets",
        "_request_ids",
        "_texts",
    )

    def __init__(self) -> None:
        self._full: list[Deltas] = []
        self._begin()

    def add(self, journal: Journal, text: str) -> None:
        """Take new text of a request, which counts as sent from now on, and its tokens."""
        self._request_ids.append(journal.request_id)
        self._texts.append(text)
        self._offsets.append(journal.sent)
        self._counts.append(len(journal.output))
        journal.sent += len(text)
        if journal.teller is not None:
            for details in journal.teller.claim():
                self._tell(details)

    def finish(self, finished: Finished) -> None:
        self._finished.append(finished)

    def messages(self) -> list[Deltas]:
        return [*self._full, self._message()]

    def _tell(self, details: TokenDetails) -> None:
        items = len(details.token_ids) + len(details.pair_ids)
        if self._details and self._items + items > MAX_ITEMS:
            self._full.append(self._message())
            self._begin()
        self._details.append(details)
        self._items += items

    def _begin(self) -> None:
        self._request_ids: list[RequestId] = []
        self._texts: list[str] = []
        self._offsets: list[int] = []
        self._counts: list[int] = []
        self._finished: list[Finished] = []
        self._details: list[TokenDetails] = []
        self._items = 0

    def _message(self) -> Deltas:
        return Deltas(
            request_ids=self._request_ids,
            texts=self._texts,
            offsets=int32s(self._offsets),
            token_counts=int32s(self._counts),
            finished=self._finished,
            details=self._details,
        )

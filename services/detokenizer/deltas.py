"""One gateway's share of an iteration, gathered row by row."""

from __future__ import annotations

from services.detokenizer.journal import Journal
from shared.messages import Deltas, Finished
from shared.types import RequestId, int32s


class DeltaColumns:
    """Becomes one `Deltas` message."""

    __slots__ = ("_counts", "_finished", "_offsets", "_request_ids", "_texts")

    def __init__(self) -> None:
        self._request_ids: list[RequestId] = []
        self._texts: list[str] = []
        self._offsets: list[int] = []
        self._counts: list[int] = []
        self._finished: list[Finished] = []

    def add(self, journal: Journal, text: str) -> None:
        """Take new text of a request, which counts as sent from now on."""
        self._request_ids.append(journal.request_id)
        self._texts.append(text)
        self._offsets.append(journal.sent)
        self._counts.append(len(journal.output))
        journal.sent += len(text)

    def finish(self, finished: Finished) -> None:
        self._finished.append(finished)

    def message(self) -> Deltas:
        return Deltas(
            request_ids=self._request_ids,
            texts=self._texts,
            offsets=int32s(self._offsets),
            token_counts=int32s(self._counts),
            finished=self._finished,
        )

"""Who waits for a place: first come, first served; the preempted before all others."""

from __future__ import annotations

from collections import OrderedDict

from services.scheduler.sequence import Sequence
from shared.types import RequestId


class WaitingQueue:
    """Sequences in the order in which they will be admitted."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[RequestId, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __bool__(self) -> bool:
        return bool(self._sequences)

    @property
    def first(self) -> Sequence:
        return next(iter(self._sequences.values()))

    def append(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Return a preempted sequence. Victims come youngest first, so the front stays sorted."""
        self._sequences[sequence.request_id] = sequence
        self._sequences.move_to_end(sequence.request_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]

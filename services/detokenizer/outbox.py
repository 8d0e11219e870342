"""What one incoming message leads to: a `Deltas` for each gateway, and single messages."""

from __future__ import annotations

from services.detokenizer.deltas import DeltaColumns
from services.detokenizer.journal import Journal
from shared.messages import Abort, Accepted, Message, Recalled, Released, Submit
from shared.types import ServiceName

Outgoing = tuple[ServiceName, str, Message]  # to the instance of this name


class Outbox:
    def __init__(self) -> None:
        self._first: list[Outgoing] = []
        self._deltas: dict[str, DeltaColumns] = {}
        self._last: list[Outgoing] = []

    def accept(self, journal: Journal) -> None:
        accepted = Accepted(journal.request_id, len(journal.prompt), journal.scheduler.name)
        self._first.append((ServiceName.GATEWAY, journal.gateway, accepted))

    def deltas(self, gateway: str) -> DeltaColumns:
        columns = self._deltas.get(gateway)
        if columns is None:
            columns = self._deltas[gateway] = DeltaColumns()
        return columns

    def abort(self, journal: Journal, reason: str) -> None:
        abort = Abort(journal.request_id, reason)
        self.tell(journal.scheduler.name, abort)

    def tell(self, scheduler: str, message: Abort | Submit | Recalled | Released) -> None:
        self._last.append((ServiceName.SCHEDULER, scheduler, message))

    def messages(self) -> list[Outgoing]:
        deltas = [
            (ServiceName.GATEWAY, gateway, message)
            for gateway, columns in self._deltas.items()
            for message in columns.messages()
        ]
        return [*self._first, *deltas, *self._last]

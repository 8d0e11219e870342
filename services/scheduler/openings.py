"""Telling detokenizers of requests: of new ones, and of those whose detokenizer was lost."""

from __future__ import annotations

from collections.abc import Sequence as Names
from typing import Protocol

from services.scheduler.core import SchedulerCore
from services.scheduler.sequence import Sequence
from shared.messages import Message, Open
from shared.types import ServiceName


class Link(Protocol):
    """What of the mesh is needed here."""

    def send(self, service: ServiceName, name: str, message: Message) -> bool: ...

    def peers(self, service: ServiceName) -> Names[str]: ...

    def present(self, service: ServiceName) -> Names[str]: ...


class Openings:
    """Sends `Open` for all that was not opened, as soon as somebody can be told."""

    def __init__(self, core: SchedulerCore, link: Link) -> None:
        self._core = core
        self._link = link

    @property
    def stuck(self) -> bool:
        """Whether somebody waits for a detokenizer that is not there."""
        if not self._core.unopened:
            return False
        return any(self._choose(one) is None for one in self._core.unopened.values())

    def catch_up(self) -> None:
        """Open what can be opened by now: that is, all whose tokens are all known."""
        if not self._core.unopened:
            return
        for sequence in list(self._core.unopened.values()):
            name = self._choose(sequence)
            if name is not None and sequence.settled:
                self._open(sequence, name)

    def _choose(self, sequence: Sequence) -> str | None:
        """The detokenizer of its route; another only if it was lost: else it may have a journal."""
        routed = sequence.route.detokenizer
        there = routed in self._link.present(ServiceName.DETOKENIZER)
        if there or not sequence.retold:
            return routed if there else None
        names = self._link.peers(ServiceName.DETOKENIZER)
        return names[sequence.handle % len(names)] if names else None

    def _open(self, sequence: Sequence, name: str) -> None:
        sequence.assign(name)
        self._core.name_anew(sequence)
        opened = Open(
            request_id=sequence.request_id,
            handle=sequence.handle,
            gateway=sequence.route.gateway,
            token_ids=sequence.token_ids,  # no copy: it is encoded at once
            params=sequence.asked,
            output_tokens=sequence.output_tokens,
            tenant=sequence.tenant,
            priority=sequence.priority,
            cache_salt=sequence.cache_salt,
        )
        if self._link.send(ServiceName.DETOKENIZER, name, opened):
            self._core.opened(sequence)

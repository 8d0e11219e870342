"""The executors that announced themselves: taken when they can be sent plans, and let go."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Names
from typing import Protocol

import structlog
from prometheus_client import Counter

from services.scheduler.core import POISON, SchedulerCore
from services.scheduler.sequence import Sequence
from shared.codec import Identity
from shared.messages import Announce, Failure, Message, Recall, Roster
from shared.types import ServiceName

MAX_STRANGERS = 64  # executors that announced themselves and are not linked to
MAX_KNOWN = 2 * MAX_STRANGERS


class Link(Protocol):
    """What of the mesh is needed here."""

    def send(self, service: ServiceName, name: str, message: Message) -> bool: ...

    def peers(self, service: ServiceName) -> Names[str]: ...

    def present(self, service: ServiceName) -> Names[str]: ...


class Executors:
    """Of each name there is one life and one session at a time."""

    def __init__(
        self,
        core: SchedulerCore,
        link: Link,
        failed: Callable[[Sequence, Failure], None],
        recoveries: Counter,
    ) -> None:
        """`failed` is told of requests that ended by what became of executors."""
        self._core = core
        self._link = link
        self._failed = failed
        self._recoveries = recoveries
        self._known: dict[str, tuple[Identity, Announce]] = {}  # as they announced themselves
        self._roster = Roster([])  # as it was told last
        self._log = structlog.get_logger(ServiceName.SCHEDULER.value)

    def drives(self, executor: Identity) -> bool:
        """Whether this life of it is sent plans."""
        known = self._known.get(executor.name)
        return known is not None and known[0] == executor

    def announced(self, capacity: Announce, executor: Identity) -> None:
        if self._known.get(executor.name) == (executor, capacity):
            return  # a repetition
        # It started anew, or dropped its state: either way nothing that ran there is left.
        self._let_go(executor.name)
        self._known.pop(executor.name, None)
        self._known[executor.name] = executor, capacity
        self._forget_strangers()
        if executor.name in self._link.present(ServiceName.MODEL_EXECUTOR):
            self._take(executor.name)

    def joined(self, name: str) -> None:
        self._link.send(ServiceName.MODEL_EXECUTOR, name, self._roster)
        if name in self._known:
            self._take(name)

    def withdrew(self, name: str) -> None:
        """It belongs to another scheduler now."""
        self._known.pop(name, None)
        self._let_go(name, died=False)

    def leaves(self, name: str) -> None:
        if (engine := self._core.fleet.get(name)) is not None:
            engine.leaving = True

    def lost(self, name: str) -> None:
        self._known.pop(name, None)
        self._let_go(name)

    def tell(self) -> None:
        """All executors hear whom we have, if that is new: so they spread over the schedulers."""
        roster = Roster(sorted(self._core.fleet.names))
        if roster != self._roster:
            self._roster = roster
            for name in self._link.present(ServiceName.MODEL_EXECUTOR):
                self._link.send(ServiceName.MODEL_EXECUTOR, name, roster)

    def _forget_strangers(self) -> None:
        """Whoever announces itself is linked to soon, or it is not there."""
        if len(self._known) > MAX_KNOWN:
            present = self._link.present(ServiceName.MODEL_EXECUTOR)
            for name in [name for name in self._known if name not in present][:-MAX_STRANGERS]:
                del self._known[name]

    def _take(self, name: str) -> None:
        _, capacity = self._known[name]
        try:
            misfits = self._core.connect(name, capacity)
        except ValueError as error:
            self._log.error("executor refused", executor=name, reason=str(error))
            return
        if name not in self._link.peers(ServiceName.MODEL_EXECUTOR):
            self.leaves(name)
        self._log.info("executor connected", executor=name, blocks=capacity.num_blocks)
        for sequence, failure in misfits:
            self._failed(sequence, failure)

    def _let_go(self, name: str, *, died: bool = True) -> None:
        engine = self._core.fleet.get(name)
        if engine is None:
            return
        self._log.warning(
            "executor lost, its requests will be computed again",
            executor=name,
            requests=len(engine.running),
            moved=not died,
        )
        if died:
            self._recoveries.labels(ServiceName.MODEL_EXECUTOR).inc()
        for sequence in self._core.disconnect(name, died=died):
            self._failed(sequence, POISON)
        for detokenizer in self._link.present(ServiceName.DETOKENIZER):
            recall = Recall(self._core.recalls, self._core.spared(detokenizer))
            self._link.send(ServiceName.DETOKENIZER, detokenizer, recall)

"""Whether the mesh is whole, and whether a token has come through it since it was."""

from __future__ import annotations

from shared.types import ServiceName

# What a token passes through; executors are seen through their scheduler's credit.
PATH = (ServiceName.TOKENIZER, ServiceName.SCHEDULER, ServiceName.DETOKENIZER)


class Readiness:
    """Fed with peers that come and go; says what is missing and when to probe."""

    def __init__(self) -> None:
        self._instances: dict[ServiceName, set[str]] = {}  # every service once seen
        self._life = 0  # rises when a service is lost: a probe of a former life proves nothing
        self._probed: int | None = None  # the life in which a probe came through

    def joined(self, service: ServiceName, name: str) -> None:
        if service is not ServiceName.GATEWAY:  # others of our kind may come and go
            self._instances.setdefault(service, set()).add(name)

    def lost(self, service: ServiceName, name: str) -> None:
        instances = self._instances.get(service, set())
        if name in instances:
            instances.discard(name)
            self._life += not instances

    @property
    def missing(self) -> list[str]:
        """Services that were here once and have no instance left."""
        return sorted(service for service, names in self._instances.items() if not names)

    @property
    def absent(self) -> list[str]:
        """Services of a token's path that have no instance, be they lost or yet to come."""
        return [service for service in PATH if not self._instances.get(service)]

    @property
    def whole(self) -> bool:
        return not self.absent and not self.missing

    @property
    def ready(self) -> bool:
        return self._probed == self._life and self.whole

    @property
    def life(self) -> int:
        return self._life

    def passed(self, life: int) -> None:
        """A probe that began in this life came through."""
        self._probed = life

"""Every live instance of the mesh and what it says of itself, whichever gateway is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.gateway.gather import Gatherer, Instance
from shared.codec import Identity
from shared.messages import Status, StatusReply, StatusRequest
from shared.types import Incarnation, ServiceName

SILENT = "silent"  # the state of who does not answer in time


class Overview:
    def __init__(self, gatherer: Gatherer, own: Identity, status: Callable[[], Status]) -> None:
        self._gatherer = gatherer
        self._own = own
        self._status = status

    async def instances(self) -> list[dict[str, Any]]:
        """As JSON, in the order of services and names."""
        gathered = await self._gatherer.ask(StatusRequest, StatusReply)
        own = (self._own.service, self._own.name)
        found: dict[Instance, dict[str, Any]] = {
            own: _told(self._own.incarnation, self._status()),
            **{
                instance: _told(answer.incarnation, answer.reply.status)
                for instance, answer in gathered.answers.items()
            },
            **{instance: {"state": SILENT} for instance in gathered.silent},
        }
        order = list(ServiceName)
        return [
            {"service": service, "name": name, **found[service, name]}
            for service, name in sorted(found, key=lambda one: (order.index(one[0]), one[1]))
        ]


def _told(incarnation: Incarnation, status: Status) -> dict[str, Any]:
    return {
        "state": status.state.name.lower(),
        "incarnation": f"{incarnation:016x}",
        "host": status.host,
        "pid": status.pid,
        "age": round(status.age, 3),
        "load": {figure.name: _number(figure.value) for figure in status.load},
    }


def _number(value: float) -> float | int:
    return int(value) if value.is_integer() else round(value, 6)

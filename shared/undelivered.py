"""Messages for instances whose link is not up yet: a request can be faster than discovery."""

from __future__ import annotations

from shared.messages import Message
from shared.types import ServiceName

MAX_MESSAGES = 4096  # a link takes milliseconds; what has waited longest is not for anybody


class Undelivered:
    def __init__(self) -> None:
        self._messages: dict[tuple[ServiceName, str], list[Message]] = {}
        self._size = 0

    def keep(self, service: ServiceName, name: str, message: Message) -> None:
        """If there are too many, those go whose instance is longest in coming."""
        self._messages.setdefault((service, name), []).append(message)
        self._size += 1
        if self._size > MAX_MESSAGES:
            self.claim(*next(iter(self._messages)))

    def claim(self, service: ServiceName, name: str) -> list[Message]:
        """What waited for this instance, in order."""
        messages = self._messages.pop((service, name), [])
        self._size -= len(messages)
        return messages

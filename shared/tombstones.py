"""Aborts that came before their requests."""

from __future__ import annotations

from collections import OrderedDict

from shared.types import RequestId

LIMIT = 8192  # far more than requests can be on their way from a gateway


class Tombstones:
    """Remembers the newest `LIMIT` request ids."""

    def __init__(self) -> None:
        self._ids: OrderedDict[RequestId, None] = OrderedDict()

    def bury(self, request_id: RequestId) -> None:
        self._ids[request_id] = None
        if len(self._ids) > LIMIT:
            self._ids.popitem(last=False)

    def claim(self, request_id: RequestId) -> bool:
        """Whether the request was aborted before it came; forgets it."""
        return request_id in self._ids and self._ids.pop(request_id) is None

from __future__ import annotations

import pytest

from shared import undelivered as module
from shared.messages import Abort
from shared.types import RequestId, ServiceName
from shared.undelivered import Undelivered


def test_messages_wait_in_order_for_their_own_instance() -> None:
    messages = [Abort(RequestId(name), "") for name in "abc"]
    waiting = Undelivered()
    waiting.keep(ServiceName.GATEWAY, "x", messages[0])
    waiting.keep(ServiceName.SCHEDULER, "x", messages[1])
    waiting.keep(ServiceName.GATEWAY, "x", messages[2])
    assert waiting.claim(ServiceName.GATEWAY, "y") == []
    assert waiting.claim(ServiceName.GATEWAY, "x") == [messages[0], messages[2]]
    assert waiting.claim(ServiceName.GATEWAY, "x") == []


def test_names_that_nobody_has_take_no_room_from_those_that_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 8)
    waiting, message = Undelivered(), Abort(RequestId("a"), "")
    for number in range(100):
        waiting.keep(ServiceName.GATEWAY, f"nobody.{number}", message)
        assert waiting._size == sum(map(len, waiting._messages.values())) <= 8
    waiting.keep(ServiceName.GATEWAY, "late", message)
    for number in range(7):
        waiting.keep(ServiceName.GATEWAY, f"nobody.{number}", message)
    assert waiting.claim(ServiceName.GATEWAY, "late") == [message]

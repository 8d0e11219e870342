from __future__ import annotations

import pytest

from shared import undelivered as module
from shared.messages import Abort
from shared.types import RequestId, ServiceName
from shared.undelivered import Undelivered


def test_messages_wait_in_order_for_their_own_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 3)
    messages = [Abort(RequestId(name), "") for name in "abcd"]
    waiting = Undelivered()
    assert waiting.keep(ServiceName.GATEWAY, "x", messages[0])
    assert waiting.keep(ServiceName.SCHEDULER, "x", messages[1])
    assert waiting.keep(ServiceName.GATEWAY, "x", messages[2])
    assert not waiting.keep(ServiceName.GATEWAY, "x", messages[3])
    assert waiting.claim(ServiceName.GATEWAY, "y") == []
    assert waiting.claim(ServiceName.GATEWAY, "x") == [messages[0], messages[2]]
    assert waiting.claim(ServiceName.GATEWAY, "x") == []
    assert waiting.keep(ServiceName.GATEWAY, "x", messages[3])

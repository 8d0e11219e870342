"""Whatever reaches a detokenizer's inbox, it goes on, and is right afterwards."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from scripts.frames import Pools
from services.detokenizer.service import DetokenizerService
from shared.messages import Accepted, Deltas, Finished, Open, StepResult
from shared.sampling import SamplingParams
from shared.types import FinishReason, Handle, RequestId, ServiceName, int32s
from tests.conftest import Station
from tests.inboxes.subject import Subject, hear

GATEWAY, SCHEDULER = ServiceName.GATEWAY, ServiceName.SCHEDULER
EXECUTOR, DETOKENIZER = ServiceName.MODEL_EXECUTOR, ServiceName.DETOKENIZER
TEXT = "The water turns the wheel."


class DetokenizerUnderAttack(Subject):
    """An attack knows its scheduler, all handles, and where each request stands."""

    kind = DetokenizerService
    peers = (GATEWAY, SCHEDULER, EXECUTOR)
    service: DetokenizerService

    def pools(self) -> Pools:
        core = self.service._core
        epoch = self.at[SCHEDULER].mesh.identity.incarnation
        journals = core._lives[epoch].journals if epoch in core._lives else {}
        return {
            "epoch": lambda: [epoch],
            "handle": lambda: [*journals, *range(1, 5)],
            "position": lambda: [journal.next_position for journal in journals.values()],
            "request_id": lambda: [RequestId("a"), RequestId("b"), RequestId("c")],
            "gateway": lambda: ["gateway.0", "gateway.0", "gateway.9"],
        }

    async def ask(self, at: dict[ServiceName, Station]) -> None:
        ids = Tokenizer.from_file(str(self._model / "tokenizer.json")).encode(TEXT).ids
        params, handle = SamplingParams(seed=1, max_tokens=100), Handle(2**30)
        opened = Open(RequestId("wanted"), handle, "gateway.0", int32s([1]), params)
        at[SCHEDULER].say(DETOKENIZER, opened)
        assert await hear(at[GATEWAY], Accepted) == Accepted(opened.request_id, 1, "scheduler.0")
        text, epoch = "", at[SCHEDULER].mesh.identity.incarnation
        for place, token in enumerate(ids, 1):
            finish = FinishReason.LENGTH if place == len(ids) else FinishReason.NONE
            columns = int32s([handle]), int32s([place]), int32s([token]), bytes([finish])
            at[EXECUTOR].say(DETOKENIZER, StepResult(epoch, place, *columns))
            deltas = await hear(at[GATEWAY], Deltas)
            text += "".join(deltas.texts)
        assert text == TEXT
        assert deltas.finished == [Finished(opened.request_id, FinishReason.LENGTH, len(ids))]


def test_a_detokenizer_goes_on(model_dir: Path) -> None:
    with DetokenizerUnderAttack(model_dir) as subject:
        subject.goes_on()

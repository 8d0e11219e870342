"""Whatever reaches a tokenizer's inbox, it goes on, and is right afterwards."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from scripts.frames import Pools
from services.tokenizer.service import TokenizerService
from shared.messages import Encode, Encoded, Generate, Prompt, Route, Submit
from shared.sampling import SamplingParams
from shared.types import RequestId, ServiceName, int32s
from tests.conftest import Station
from tests.inboxes.subject import Subject, hear

GATEWAY, TOKENIZER, SCHEDULER = (
    ServiceName.GATEWAY,
    ServiceName.TOKENIZER,
    ServiceName.SCHEDULER,
)
TEXT = "The water turns the wheel."


class TokenizerUnderAttack(Subject):
    kind = TokenizerService
    peers = (GATEWAY, SCHEDULER)

    def pools(self) -> Pools:
        return {"gateway": lambda: ["gateway.0"]}

    def idle(self) -> bool:
        return not self.service.busy

    async def ask(self, at: dict[ServiceName, Station]) -> None:
        tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        ids = int32s(tokenizer.encode(TEXT).ids)
        prompt, route = Prompt(text=TEXT), Route("gateway.0", "detokenizer.0")
        at[GATEWAY].say(TOKENIZER, Encode(RequestId("asked"), prompt))
        assert (await hear(at[GATEWAY], Encoded)).token_ids == ids
        params = SamplingParams(seed=3, max_tokens=5)
        at[GATEWAY].say(TOKENIZER, Generate(RequestId("wanted"), prompt, params, route))
        submit = await hear(at[SCHEDULER], Submit)
        assert submit == Submit(RequestId("wanted"), ids, params, route)


def test_a_tokenizer_goes_on(model_dir: Path) -> None:
    with TokenizerUnderAttack(model_dir) as subject:
        subject.goes_on()

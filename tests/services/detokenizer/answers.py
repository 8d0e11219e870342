"""What requests that want more than text are told."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.outbox import Outgoing
from shared.codec import Identity
from shared.messages import (
    Abort,
    Accepted,
    Deltas,
    Finished,
    Logprobs,
    Open,
    StepResult,
    TokenDetails,
)
from shared.sampling import SamplingParams
from shared.types import FinishReason, Handle, Incarnation, RequestId, ServiceName, int32s

SCHEDULER = Identity(ServiceName.SCHEDULER, "scheduler.0", Incarnation(7))
R = RequestId("r")
NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH
END = 2  # <|im_end|>


def joined(parts: list[TokenDetails]) -> TokenDetails:
    """All in one; they must follow upon each other."""
    whole = parts[0]
    for part in parts[1:]:
        assert part.position == whole.position + len(whole.token_ids)
        whole = TokenDetails(
            R,
            whole.position,
            whole.token_ids + part.token_ids,
            whole.pieces + part.pieces,
            whole.text_offsets + part.text_offsets,
            whole.ranks + part.ranks,
            whole.counts + part.counts,
            whole.pair_ids + part.pair_ids,
            whole.pair_pieces + part.pair_pieces,
            whole.values + part.values,
        )
    return whole


def opened(prompt: Sequence[int], **params: Any) -> Open:
    sampling = SamplingParams(seed=1, **{"max_tokens": 100, **params})
    return Open(R, Handle(1), "gateway.0", int32s(prompt), sampling)


def thought(first: int, ids: Iterable[int], pairs: int = 1) -> Logprobs:
    """What a model might think of tokens from position `first` on: -p for that at p."""
    positions = range(first, first + len(list(ids)))
    token_ids = [one + place for one in ids for place in range(pairs)]
    values = [-float(position) for position in positions for _ in range(pairs)]
    return Logprobs(
        int32s([1] * len(positions)),
        int32s(positions),
        int32s(position + 1 for position in positions),
        int32s([pairs] * len(positions)),
        int32s(token_ids),
        struct.pack(f"<{len(values)}f", *values),
    )


def chunk(first: int, ids: Sequence[int]) -> StepResult:
    """A part of the prompt, with nothing sampled."""
    none = int32s()
    return StepResult(SCHEDULER.incarnation, 1, none, none, none, b"", 0, thought(first, ids))


def sampled(
    position: int, token_id: int, finish: FinishReason = NONE, logprobs: Logprobs | None = None
) -> StepResult:
    columns = int32s([1]), int32s([position]), int32s([token_id]), bytes([finish])
    return StepResult(SCHEDULER.incarnation, 1, *columns, 0, logprobs)


class Answer:
    """All that the gateway hears of one request."""

    def __init__(self) -> None:
        self.text = ""
        self.parts: list[TokenDetails] = []
        self.counts: list[int] = []
        self.end: Finished | None = None
        self.aborts: list[str] = []

    def read(self, outgoing: Iterable[Outgoing]) -> None:
        for _, _, message in outgoing:
            if isinstance(message, Deltas):
                for text, offset in zip(message.texts, message.offsets, strict=True):
                    assert offset == len(self.text)
                    self.text += text
                self.counts += message.token_counts
                self.parts += message.details
                assert self.end is None
                self.end = message.finished[0] if message.finished else None
            elif isinstance(message, Abort):
                self.aborts.append(message.reason)
            else:
                assert isinstance(message, Accepted)

    @property
    def told(self) -> TokenDetails:
        return joined(self.parts)


def run(core: DetokenizerCore, request: Open, ids: Sequence[int], end: FinishReason) -> Answer:
    """Without logprobs."""
    answer = Answer()
    answer.read(core.open(request, SCHEDULER))
    for place, one in enumerate(ids):
        finish = end if place == len(ids) - 1 else NONE
        answer.read(core.step(sampled(len(request.token_ids) + place, one, finish)))
        if answer.end is not None:
            break
    return answer

"""The strict executor, with something to say of each token, and of each prompt."""

from __future__ import annotations

import struct

from shared.messages import Announce, Embedding, EnteringSequence, Logprobs, StepResult
from shared.sampling import SamplingParams
from shared.types import Int32s, int32s
from tests.services.scheduler.strict_executor import Occupant, StrictExecutor, token_of


class TellingExecutor(StrictExecutor):
    """Says something of each token, and of each prompt, to those who want to hear it."""

    def __init__(self, capacity: Announce) -> None:
        super().__init__(capacity, ahead=True)
        self._entries: list[tuple[EnteringSequence, int]] = []  # and a position
        self._embeddings: list[Embedding] = []

    def claim(self, result: StepResult) -> tuple[Logprobs | None, list[Embedding]]:
        """What comes beside an iteration's tokens."""
        params = {int(o.entered.handle): o.entered for o in self.slots.values()}
        for handle, position in zip(result.handles, result.positions, strict=True):
            if params[handle].params.logprobs is not None:
                self._entries.append((params[handle], position))
        entries, self._entries = self._entries, []
        embeddings, self._embeddings = self._embeddings, []
        return _logprobs(entries) if entries else None, embeddings

    def _compute(self, occupant: Occupant, start: int, count: int) -> None:
        super()._compute(occupant, start, count)
        entered, end = occupant.entered, start + count
        if entered.params.prompt_logprobs is not None:
            told = range(start + 1, min(end + 1, entered.prompt_tokens))
            self._entries += [(entered, position) for position in told]
        if entered.params.embed and end == entered.prompt_tokens:
            vector = embedding_of(entered.token_ids[: entered.prompt_tokens])
            self._embeddings.append(Embedding(entered.handle, vector))


def rank_of(params: SamplingParams, position: int) -> int:
    return 1 + (params.seed + position) % 1000


def embedding_of(prompt: Int32s) -> bytes:
    return struct.pack("<2f", len(prompt), prompt[0])


def _logprobs(entries: list[tuple[EnteringSequence, int]]) -> Logprobs:
    """Of each the token itself, and no others."""
    ids = [
        entered.token_ids[position]
        if position < entered.prompt_tokens
        else token_of(entered.params, position)
        for entered, position in entries
    ]
    ranks = int32s(rank_of(entered.params, position) for entered, position in entries)
    return Logprobs(
        handles=int32s(entered.handle for entered, _ in entries),
        positions=int32s(position for _, position in entries),
        ranks=ranks,
        counts=int32s([1] * len(entries)),
        token_ids=int32s(ids),
        values=struct.pack(f"<{len(ranks)}f", *(-rank for rank in ranks)),
    )

"""What the model says beside tokens: its logprobs of them, and embeddings of prompts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kernels.logprobs import TokenLogprobs, token_logprobs
from services.model_executor.batch import Ints, PersistentBatch, Rows
from services.model_executor.report import Floats, LogprobTable, Report
from services.model_executor.trunk import Iteration
from services.model_executor.wishes import PromptRun

HEAD_NUMBERS = 1 << 24  # logits of a prompt's tokens that are made at once


class Reporter:
    """One iteration's wishes, made before its logits are changed, fulfilled when it has sampled."""

    def __init__(
        self,
        batch: PersistentBatch,
        rows: Rows,
        row_firsts: Ints,
        iteration: Iteration,
        logits: Tensor,
    ) -> None:
        """row_firsts: each row's first token in the flat batch; logits: of rows that sample."""
        self._batch = batch
        self._rows = rows
        self._row_firsts = row_firsts
        self._iteration = iteration
        self._chunk = max(1, HEAD_NUMBERS // batch.limits.vocab_size)  # tokens
        self._device = logits.device
        self._sampled = batch.wishes.sampled(rows.sampling_slots)
        self._logits = logits[self._upload(self._sampled)]  # a copy

    def report(self, tokens: Tensor) -> Report:
        """tokens: those sampled, int64 [rows that sample]."""
        rows, wishes = self._rows, self._batch.wishes
        runs = wishes.prompts(rows.slots, rows.starts, rows.counts)
        tables = [self._prompt(run) for run in runs]
        if len(self._sampled):
            tables.append(self._sample(tokens))
        return Report(tables, self._embeddings())

    def _prompt(self, run: PromptRun) -> LogprobTable:
        begin = int(self._row_firsts[run.row])
        targets = self._batch.tokens[run.slot, run.first : run.first + run.length].long()
        parts = []
        for at in range(0, run.length, self._chunk):
            end = min(at + self._chunk, run.length)
            wanted = torch.arange(begin + at, begin + end, device=self._device)
            logits = self._iteration.logits(wanted)
            parts.append(token_logprobs(logits, targets[at:end], run.alternatives))
        told = TokenLogprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        slots, counts = np.full((2, run.length), [[run.slot], [run.alternatives]])
        return _table(told, slots, run.first + np.arange(run.length), counts)

    def _sample(self, tokens: Tensor) -> LogprobTable:
        chosen = self._sampled
        slots = self._rows.sampling_slots[chosen]
        counts = self._batch.wishes.logprobs[slots]
        told = token_logprobs(self._logits, tokens[self._upload(chosen)], int(counts.max()))
        return _table(told, slots, self._rows.positions[chosen], counts)

    def _embeddings(self) -> dict[int, Floats]:
        rows = self._rows
        chosen = rows.sampling[self._batch.wishes.embedded(rows.sampling_slots, rows.positions)]
        if not len(chosen):
            return {}
        lasts = self._row_firsts[chosen] + rows.counts[chosen] - 1
        states = self._iteration.hidden(self._upload(lasts)).float()
        vectors = normalize(states, dim=-1).cpu().numpy()
        return dict(zip(rows.slots[chosen].tolist(), vectors, strict=True))

    def _upload(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _table(told: TokenLogprobs, slots: Ints, positions: Ints, counts: Ints) -> LogprobTable:
    """counts: alternatives wanted; there may be fewer."""
    ranks, token_ids, values = (column.cpu().numpy() for column in told)
    pairs = np.minimum(counts + 1, token_ids.shape[1])
    return LogprobTable(slots, positions, ranks, pairs, token_ids, values)

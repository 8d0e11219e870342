"""Runs plans: one forward pass and one token for each row that samples."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_batch import PagedBatch
from kernels.sampling import sample
from kernels.token_bitmask import apply_token_bitmask
from services.model_executor.attention import CachedPass
from services.model_executor.backend import Backend, Computed
from services.model_executor.batch import Rows
from services.model_executor.cpu import keep_memory, use_threads
from services.model_executor.kv_cache import allocate, count_blocks
from services.model_executor.loader import choose_device, load_model
from services.model_executor.report import NO_REPORT
from services.model_executor.reporter import Reporter
from services.model_executor.results import Span
from services.model_executor.trunk import Iteration
from shared.messages import Announce, EnteringSequence, Plan
from shared.model import ModelInfo
from shared.sampling import SamplingParams
from shared.service import StartError
from shared.settings import Settings
from shared.types import Handle, Incarnation, int32s


class ModelRunner(Backend):
    """A loaded model and its KV cache."""

    def __init__(self, settings: Settings, info: ModelInfo) -> None:
        """Load and warm up; raises StartError."""
        use_threads(settings.cpu_threads, settings.executors)
        keep_memory()
        self._device = choose_device(settings)
        self._model, layers = load_model(settings, info, self._device)
        self._dtype: torch.dtype = next(self._model.parameters()).dtype
        blocks = count_blocks(settings, layers, self._dtype, self._device, info.max_model_len)
        if blocks < 1:
            raise StartError("the memory for the KV cache holds not one block")
        self._caches = allocate(layers, blocks, settings.block_size, self._dtype, self._device)
        limits = Announce(
            fingerprint=f"{info.fingerprint}-{str(self._dtype).removeprefix('torch.')}",
            num_blocks=blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
        )
        super().__init__(limits, info, self._device)
        self._warm_up()

    @torch.inference_mode()
    def _compute(self, rows: Rows, arrived: float | None) -> Computed:
        began = time.monotonic()
        if not len(rows.slots):  # all of them had finished
            return Computed(np.zeros(0, np.int64), np.zeros(0, np.bool_), Span(began, began))
        paged = self._paged(rows)
        iteration = self._iteration(rows, paged)
        lasts = paged.row_firsts[rows.sampling] + rows.counts[rows.sampling] - 1
        logits = iteration.logits(self._upload(lasts))
        reporter = None
        if self._batch.wishes.any(rows.slots):
            reporter = Reporter(self._batch, rows, paged.row_firsts, iteration, logits)
        tokens, broken = self._sample(logits, rows)
        report = reporter.report(tokens) if reporter else NO_REPORT
        return Computed(
            tokens.cpu().numpy(), broken.cpu().numpy(), Span(began, time.monotonic()), report
        )

    def _paged(self, rows: Rows) -> PagedBatch:
        return PagedBatch(
            rows.starts,
            rows.counts,
            self._batch.blocks[rows.slots],
            block_size=self._limits.block_size,
            null_block=self._limits.num_blocks,
            device=self._device,
            dtype=self._dtype,
        )

    def _iteration(self, rows: Rows, paged: PagedBatch) -> Iteration:
        positions = self._upload(paged.positions)
        slots = self._upload(rows.slots[paged.token_rows])
        return Iteration(
            self._model,
            self._batch.tokens[slots, positions],
            positions,
            CachedPass(paged, self._caches),
        )

    def _sample(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The tokens, also put into the batch, and whether a row has none to choose."""
        slots, positions = rows.sampling_slots, rows.positions
        batch = self._batch
        masks = self._grammars.masks(slots)
        if masks is not None:
            apply_token_bitmask(logits, self._upload(masks.bits))
        logits = batch.adjustments.apply(logits, batch.tokens, slots, positions)
        tokens = sample(logits, batch.sampling.take(slots), positions)
        batch.tokens[self._upload(slots), self._upload(positions)] = tokens.to(torch.int32)
        best = logits.amax(-1)
        broken = best.isnan() | best.isneginf()
        if masks is not None:
            broken |= self._upload(masks.broken)
        return tokens, broken

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)

    def _warm_up(self) -> None:
        """Run one prefill, so that whatever is prepared on first use is."""
        tokens = min(2, self._limits.max_num_batched_tokens, self._limits.max_model_len - 1)
        blocks = -(-tokens // self._limits.block_size)
        if blocks <= self._limits.num_blocks:
            self.execute(_warm_up_plan(tokens, blocks), Incarnation(0))
        self.reset()


def _warm_up_plan(tokens: int, blocks: int) -> Plan:
    params = SamplingParams(seed=0, max_tokens=1)
    ids = int32s([0] * tokens)
    return Plan(
        step=0,
        retired=int32s(),
        entering=[EnteringSequence(0, Handle(0), "", tokens, params, ids)],
        block_slots=int32s([0]),
        block_counts=int32s([blocks]),
        block_ids=int32s(range(blocks)),
        row_slots=int32s([0]),
        row_starts=int32s([0]),
        row_tokens=int32s([tokens]),
    )

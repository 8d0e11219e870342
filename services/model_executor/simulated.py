"""An accelerator that only takes time: plans are run in full, but words come out of a hash.

Everything around the computation is real: the batch, its limits, stops, results and counters.
"""

from __future__ import annotations

import re
import time

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kernels.noise import row_keys
from services.model_executor.backend import Backend, Computed
from services.model_executor.batch import Ints, Rows
from services.model_executor.grammars import Masks
from services.model_executor.report import NO_REPORT
from services.model_executor.results import Span
from services.model_executor.simulated_reporter import SimulatedReporter, hidden_size
from shared.messages import Announce
from shared.model import ModelInfo
from shared.service import StartError
from shared.settings import Settings
from shared.simulation import Simulation

MOST_BLOCKS = 1 << 18  # unless set: 4 million tokens in blocks of 16
WORD = re.compile("[Ġ▁][a-z]{2,}")  # with the space before it, as byte-level and others write it
LETTERS = re.compile("[A-Za-z]+")  # for tokenizers that leave the space out


class SimulatedBackend(Backend):
    """Computes nothing. Holds what it is told to hold, whatever the memory of this machine."""

    def __init__(self, settings: Settings, info: ModelInfo) -> None:
        """Read the tokenizer; raises StartError."""
        useful = settings.max_num_seqs * -(-info.max_model_len // settings.block_size)
        limits = Announce(
            fingerprint=f"{info.fingerprint}-simulated",
            num_blocks=settings.num_gpu_blocks_override or min(useful, MOST_BLOCKS),
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
        )
        super().__init__(limits, info, torch.device("cpu"))
        self._simulation = Simulation.parse(settings.sim) if settings.sim else Simulation()
        self._words = find_words(info)
        self._end_id = min(info.eos_token_ids, default=-1)
        if self._simulation.end and self._end_id < 0:
            raise StartError("--sim: the model has no end id to end sequences with")
        self._tokens = self._batch.tokens.numpy()  # the same memory
        self._reporter = SimulatedReporter(self._batch, self._words, hidden_size(info))
        self._ended = 0.0  # when the last iteration did

    def _compute(self, rows: Rows, arrived: float | None) -> Computed:
        """Takes the rows' time, from their start: when they arrived, or the rows before ended.

        So plans that are there in time follow one another without a gap, as in the queue of a
        device, and what the system's clock oversleeps does not add up.
        """
        began = max(self._ended, time.monotonic() if arrived is None else arrived)
        self._ended = began
        if len(rows.slots):
            self._ended += self._simulation.seconds(rows.prefill_tokens, rows.decode_tokens)
        tokens, broken = self._sample(rows)
        report = self._reporter.report(rows) if self._batch.wishes.any(rows.slots) else NO_REPORT
        time.sleep(max(0.0, self._ended - time.monotonic()))
        span = Span(began, self._ended)
        return Computed(tokens, broken, span, report)

    def _sample(self, rows: Rows) -> tuple[Ints, NDArray[np.bool_]]:
        """A token for each row that samples: a function of what goes before, position and seed.

        And which rows have none.
        """
        slots, positions = rows.sampling_slots, rows.positions
        columns = self._batch.sampling.take(slots)
        seeds = np.where(columns.greedy, 0, columns.seed)
        last = self._tokens[slots, positions - 1].astype(np.int64)
        words, chances = row_keys(seeds ^ (last + 1), positions).view(np.uint32)
        tokens: Ints = self._words[words % len(self._words)]
        for index in np.flatnonzero(chances < self._simulation.end * 2**32):
            rules = self._batch.rules[slots[index]]
            if positions[index] >= rules.first_end and self._end_id in rules.end_ids:
                tokens[index] = self._end_id
        masks = self._grammars.masks(slots)
        broken = np.zeros(len(tokens), np.bool_)
        if masks is not None:
            broken = masks.broken
            self._keep_allowed(tokens, words, masks)
        self._tokens[slots, positions] = tokens
        return tokens, broken

    def _keep_allowed(self, tokens: Ints, words: NDArray[np.uint32], masks: Masks) -> None:
        """Put others in the place of tokens that a grammar does not allow; it ends when it may."""
        vocab_size = self._limits.vocab_size
        for index in masks.lines:
            bits = np.unpackbits(masks.bits[index], count=vocab_size, bitorder="little")
            if self._end_id >= 0 and bits[self._end_id]:
                tokens[index] = self._end_id
            elif not bits[tokens[index]]:
                allowed = np.flatnonzero(bits)
                tokens[index] = allowed[words[index] % len(allowed)]


def find_words(info: ModelInfo) -> Ints:
    """Ids of plain words, sorted; no end id is among them. Raises StartError if there are none."""
    try:
        tokenizer = Tokenizer.from_file(str(info.path / "tokenizer.json"))
    except Exception as error:  # the only class that the library raises
        raise StartError(f"--model: its tokenizer cannot be read: {error}") from error
    usable = {
        text: token
        for text, token in tokenizer.get_vocab(with_added_tokens=False).items()
        if token < info.vocab_size and token not in info.eos_token_ids
    }
    for pattern in (WORD, LETTERS):
        if found := [token for text, token in usable.items() if pattern.fullmatch(text)]:
            return np.array(sorted(found), np.int64)
    raise StartError("--model: its tokenizer has no words to simulate answers with")

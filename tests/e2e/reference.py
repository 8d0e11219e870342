"""What transformers' `generate` makes of the same weights: the measure of every greedy text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor

LENGTHS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 25, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65),
    *(80, 100, 127, 128, 129, 160, 200, 255, 256, 257, 400, 511, 513, 700, 1100, 1500),
)  # tokens; around the block size of 16 and the default budget of 512, and beyond
NEW_TOKENS = 12

Adjust: TypeAlias = Callable[[Tensor, list[int]], Tensor]


@dataclass(frozen=True, slots=True)
class Expected:
    """A greedy continuation."""

    prompt: list[int]
    text: str
    tokens: int
    finish_reason: str


class Reference:
    """Greedy texts of one prepared model directory, in float32."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        return model.eval()

    @cached_property
    def mixed(self) -> list[Expected]:
        """The 40 prompts of `LENGTHS`, cut out of a text at different places."""
        text = (Path(__file__).parents[2] / "LICENSE").read_text()
        ids = self.tokenizer.encode(text).ids
        starts = (index * 37 % (len(ids) - length) for index, length in enumerate(LENGTHS))
        return [
            self.expect(ids[start : start + length], NEW_TOKENS)
            for start, length in zip(starts, LENGTHS, strict=True)
        ]

    @torch.inference_mode()
    def expect(self, prompt: list[int], max_new_tokens: int) -> Expected:
        """The greedy continuation of token ids."""
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        new = output[0, len(prompt) :].tolist()
        ended = new[-1] in self._end_ids
        return Expected(
            prompt,
            self.tokenizer.decode(new, skip_special_tokens=True),
            len(new),
            "stop" if ended else "length",
        )

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """For what may follow each of these tokens: float32 [tokens, vocabulary]."""
        logits: Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits.float()

    def greedy(self, prompt: list[int], tokens: int, adjust: Adjust) -> list[int]:
        """The likeliest tokens after `adjust`, which gets logits and what was generated."""
        output: list[int] = []
        for _ in range(tokens):
            logits = self.logits(prompt + output)[-1].clone()
            output.append(int(adjust(logits, output).argmax()))
        return output

    @property
    def _end_ids(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        return ids if isinstance(ids, list) else [ids]

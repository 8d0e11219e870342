"""What transformers' `generate` makes of the same weights: the measure of every greedy text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor

# Tokens; around the block size of 16 and the default budget of 512, and over three times that.
# Those of a line are generated together: there is little to pad.
LENGTHS = (
    (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20),
    (25, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65),
    (80, 100, 127, 128, 129, 160),
    (200, 255, 256, 257),
    (511, 513),
    (700,),
    (1100,),
)
LONGEST = LENGTHS[-1][-1]
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

    @cache  # noqa: B019 - there is one of these
    def mixed(self, longest: int = LONGEST) -> list[Expected]:
        """Prompts of all `LENGTHS` up to the longest, cut out of a text at different places."""
        lines = (line for line in LENGTHS if line[0] <= longest)
        cases = (case for line in lines for case in self._line(line))
        return [case for case in cases if len(case.prompt) <= longest]

    @cache  # noqa: B019
    def _line(self, lengths: tuple[int, ...]) -> list[Expected]:
        ids = self._text
        starts = [length * 37 % (len(ids) - length) for length in lengths]
        prompts = [ids[at : at + length] for at, length in zip(starts, lengths, strict=True)]
        return self.expect(prompts, NEW_TOKENS)

    @cached_property
    def _text(self) -> list[int]:
        text = (Path(__file__).parents[2] / "LICENSE").read_text()
        return list(self.tokenizer.encode(text).ids)

    @torch.inference_mode()
    def expect(self, prompts: list[list[int]], max_new_tokens: int) -> list[Expected]:
        """The greedy continuations of token ids."""
        width = max(map(len, prompts))
        output = self.model.generate(
            torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor(
                [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            ),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        news = output[:, width:].tolist()
        return [self._expected(prompt, new) for prompt, new in zip(prompts, news, strict=True)]

    def _expected(self, prompt: list[int], new: list[int]) -> Expected:
        """What follows an end is padding."""
        ends = [at for at, token in enumerate(new, 1) if token in self._end_ids]
        new = new[: ends[0]] if ends else new
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return Expected(prompt, text, len(new), "stop" if ends else "length")

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

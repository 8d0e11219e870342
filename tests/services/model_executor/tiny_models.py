"""Tiny models with random weights, and runners and sequences for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from services.model_executor.runner import ModelRunner
from shared.model import ModelInfo
from shared.sampling import SamplingParams
from shared.settings import Settings
from shared.types import Handle, Incarnation
from tests.services.model_executor.plan_maker import Running

EPOCH = Incarnation(7)
VOCAB = 89
MAX_MODEL_LEN = 96

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 1.0,  # with little noise, or tied embeddings, they repeat one token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def save(config: Any, path: Path, dtype: torch.dtype = torch.float32) -> ModelInfo:
    """A model with random weights, as a prepared directory."""
    torch.manual_seed(11)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    model.save_pretrained(path)
    return ModelInfo(
        path=path,
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset(),
        chat_template=None,
        bos_token="",
        eos_token="",
        model_type=config.model_type,
        fingerprint="f" * 32,
    )


def make_runner(info: ModelInfo, **changes: Any) -> ModelRunner:
    settings: dict[str, Any] = {
        "model": str(info.path),
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 7,
        "block_size": 4,
        "num_gpu_blocks_override": 90,
        "cpu_threads": 1,
    }
    return ModelRunner(Settings(**settings | changes), info)


def greedy(handle: int, prompt: list[int], max_tokens: int = 24) -> Running:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=max_tokens)
    return Running(Handle(handle), len(prompt), params, list(prompt))

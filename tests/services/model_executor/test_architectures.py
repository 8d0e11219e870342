"""Plans against transformers' own `generate`, for tiny models of many families, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from services.model_executor.runner import ModelRunner
from shared.sampling import SamplingParams
from shared.types import FinishReason, Handle
from tests.services.model_executor.plan_maker import PlanMaker, Running
from tests.services.model_executor.tiny_models import (
    COMMON,
    EPOCH,
    VOCAB,
    greedy,
    make_runner,
    save,
)

PROMPTS = ([5], [3, 1, 4, 1, 5], [(7 * i + 2) % VOCAB for i in range(33)], [88, 0, 17] * 6)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3-rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "mistral-window": ("MistralConfig", {"sliding_window": 9}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "attn_logit_softcapping": 0.3,
            "final_logit_softcapping": 9.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3Config", {}),
    "gpt-neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "n_inner": 48},
    ),
    "deepseek": (  # keys and values of different widths
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt-oss": (  # attention sinks
        "GptOssConfig",
        {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def generate(model: Any, prompt: list[int]) -> list[int]:
    """What transformers makes of it."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=0,
    )
    return list(output[0, len(prompt) :].tolist())


def run_with_preemption(runner: ModelRunner, sequences: list[Running]) -> None:
    """Enter them one by one, take the first ones out for a while in the middle, run to the end."""
    maker = PlanMaker(runner.announce())
    arriving = list(sequences)
    paused: list[Running] = []
    while arriving or paused or maker.running:
        if arriving and maker.step % 3 == 0:
            maker.enter(arriving.pop(0))
        if maker.step == 12:
            paused = [s for s in sequences[:2] if s.slot in maker.running and not s.finish]
            for sequence in paused:
                maker.retire(sequence)
        if maker.step == 15:
            for sequence in paused:
                maker.enter(sequence)
            paused = []
        maker.take(runner.execute(maker.plan(), EPOCH))


def config_of(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(**(COMMON | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    name, changes = FAMILIES[family]
    info = save(config_of(name, **changes), tmp_path)
    sequences = [greedy(i + 1, prompt) for i, prompt in enumerate(PROMPTS)]
    run_with_preemption(make_runner(info), sequences)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = [generate(model, prompt) for prompt in PROMPTS]
    assert sum(len(set(tokens)) for tokens in expected) > 40, "too dull to tell right from wrong"
    assert [sequence.outputs for sequence in sequences] == expected
    assert {sequence.finish for sequence in sequences} == {FinishReason.LENGTH}


@pytest.mark.parametrize(("max_model_len", "factors"), [(40, "short_factor"), (96, "long_factor")])
def test_longrope_is_settled_by_the_context_length(
    max_model_len: int, factors: str, tmp_path: Path
) -> None:
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.4,
        "original_max_position_embeddings": 40,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [3.0, 5.0, 7.0, 9.0],
    }
    sizes = {"original_max_position_embeddings": 40}
    info = save(config_of("Phi3Config", rope_parameters=rope, **sizes), tmp_path)
    info = replace(info, max_model_len=max_model_len)
    sequences = [greedy(i + 1, prompt, 7) for i, prompt in enumerate(PROMPTS)]
    run_with_preemption(make_runner(info), sequences)
    rope |= {"short_factor": rope[factors], "long_factor": rope[factors]}
    same = config_of("Phi3Config", rope_parameters=rope, **sizes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=same, dtype=torch.float32)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.outputs == generate(model, prompt)[:7], prompt


def test_sampled_text_is_the_same_alone_and_in_a_crowd(tmp_path: Path) -> None:
    runner = make_runner(save(config_of("LlamaConfig"), tmp_path))

    def sequences() -> list[Running]:
        params = [
            SamplingParams(seed=2**62 + 1, temperature=1.3, max_tokens=24),
            SamplingParams(seed=2, temperature=0.9, top_p=0.8, max_tokens=24),
            SamplingParams(seed=3, temperature=1.0, top_k=20, max_tokens=24),
            SamplingParams(seed=3, temperature=1.0, min_p=0.05, max_tokens=24),
        ]
        return [
            Running(Handle(i + 1), len(prompt), params[i], list(prompt))
            for i, prompt in enumerate(PROMPTS)
        ]

    crowd, alone = sequences(), sequences()
    run_with_preemption(runner, crowd)
    for one in alone:
        runner.reset()
        run_with_preemption(runner, [one])
    assert [s.outputs for s in crowd] == [s.outputs for s in alone]
    assert len({tuple(s.outputs) for s in crowd}) == len(crowd)

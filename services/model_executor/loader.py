"""A prepared model directory to a model that attends through our cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from services.model_executor.attention import (
    IMPLEMENTATION,
    ProbePass,
    Unsupported,
    forward,
    register,
)
from services.model_executor.kv_cache import LayerShape
from services.model_executor.rope import fix_frequencies
from services.model_executor.trunk import remember_trunk
from shared.model import ModelInfo
from shared.service import StartError
from shared.settings import Settings

LAYER_TYPES = {"full_attention", "sliding_attention"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(settings: Settings) -> torch.device:
    """Where the model runs; raises StartError."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise StartError("--device cuda: torch finds no CUDA device here")
    use_cuda = settings.device == "cuda" or (settings.device == "auto" and available)
    if use_cuda and settings.executors > 1:
        return torch.device("cuda", settings.index % torch.cuda.device_count())
    return torch.device("cuda" if use_cuda else "cpu")


def load_model(
    settings: Settings, info: ModelInfo, device: torch.device
) -> tuple[nn.Module, list[LayerShape]]:
    """The model, ready to run, and what its layers store; raises StartError if it cannot be served.

    Its type is the configuration's own if that is float32 or bfloat16, else bfloat16, unless set.
    """
    register()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(info.path)
        _check(config)
        model = _load(settings, info, config, device)
        fix_frequencies(model, info.max_model_len)
        remember_trunk(model)
        # An accelerator's allocator keeps what the largest iteration takes, so it is not counted
        # as free when the cache is sized.
        cpu = device.type == "cpu"
        tokens = 1 if cpu else min(settings.max_num_batched_tokens, info.max_model_len)
        return model, _probe(model, tokens, wanted=min(tokens, settings.max_num_seqs))
    except (Unsupported, ValueError, KeyError, OSError) as error:
        # A model without the attention interface looks our implementation's name up.
        without = isinstance(error, KeyError) and IMPLEMENTATION in error.args
        reason = "its attention cannot be replaced" if without else " ".join(str(error).split())
        raise StartError(f"--model: {info.model_type} cannot be served: {reason}") from error


def _check(config: PretrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise Unsupported("an encoder and a decoder")
    config = config.get_text_config(decoder=True)
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        raise Unsupported(f"layers of type {', '.join(sorted(others))}")


def _load(
    settings: Settings, info: ModelInfo, config: PretrainedConfig, device: torch.device
) -> nn.Module:
    loader: Any = AutoModelForCausalLM  # its annotations know nothing of the report
    model, report = loader.from_pretrained(
        info.path,
        dtype=_dtype(settings, config),
        attn_implementation=IMPLEMENTATION,
        device_map=None if device.type == "cpu" else {"": device},
        use_safetensors=True,
        output_loading_info=True,
    )
    if report["missing_keys"] or report["mismatched_keys"]:
        absent = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        raise Unsupported(f"weights are missing or of another shape: {', '.join(absent[:5])}")
    loaded: nn.Module = model.eval().requires_grad_(False)
    return loaded


def _dtype(settings: Settings, config: PretrainedConfig) -> torch.dtype:
    if settings.dtype in DTYPES:
        return DTYPES[settings.dtype]
    own = config.dtype
    return own if isinstance(own, torch.dtype) and own in DTYPES.values() else torch.bfloat16


@torch.inference_mode()
def _probe(model: Any, tokens: int, wanted: int) -> list[LayerShape]:
    """Run tokens through the model: what it stores of them, and whether all can be served."""
    probe = ProbePass()
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    positions = torch.arange(tokens, device=model.device)
    try:
        forward(model, ids, positions[None], positions[:wanted], probe)
    except Unsupported:
        raise
    except Exception as error:  # a model that cannot run like this may fail in any way
        raise Unsupported(f"{type(error).__name__}: {error}") from error
    config = model.config.get_text_config(decoder=True)
    if len(probe.layers) != config.num_hidden_layers:
        raise Unsupported(f"{len(probe.layers)} of {config.num_hidden_layers} layers attend")
    types = getattr(config, "layer_types", None) or []
    for layer, layer_type in enumerate(types):
        if layer_type == "sliding_attention" and probe.windows[layer] is None:
            raise Unsupported("a sliding window that is told to masks only")
    if probe.trunk_output is None:
        raise Unsupported("a head that cannot be told from its trunk")
    return probe.layers

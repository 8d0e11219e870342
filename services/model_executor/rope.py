"""Rotary frequencies that do not depend on who else is in the batch.

The types "longrope" and "dynamic" choose frequencies by the longest position of a batch: a
request would get other tokens in a crowd than alone, and cached keys would not fit later
queries. They are chosen once instead, for the context length that is served: what a model does
with a sequence of that length. (vLLM fixes "longrope" the same way.) With a context length up
to the one before stretching, nothing changes.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def fix_frequencies(model: nn.Module, max_model_len: int) -> None:
    """Settle the frequencies of all rotary embeddings in `model`."""
    for module in model.modules():
        types: Any = getattr(module, "rope_type", None)
        fixed: Any = types
        if isinstance(types, dict):  # one for each kind of layer
            fixed = {layer: _fix(module, types[layer], max_model_len, layer) for layer in types}
        elif isinstance(types, str):
            fixed = _fix(module, types, max_model_len)
        if fixed != types:
            module.rope_type = fixed


def _fix(module: Any, rope_type: str, max_model_len: int, layer_type: str | None = None) -> str:
    """Returns the type that the module has from now on."""
    if rope_type != "longrope" and "dynamic" not in rope_type:
        return rope_type
    name = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
    options = {"layer_type": layer_type} if layer_type else {}
    buffer = getattr(module, name)
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, buffer.device, seq_len=max_model_len, **options
    )
    buffer.copy_(frequencies)
    return "default"

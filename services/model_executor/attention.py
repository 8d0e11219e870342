"""Our attention, as transformers' attention interface calls it.

An `AttentionPass` travels through the model as a keyword argument of its forward call and is
given each layer's queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from kernels.paged_attention import PagedKV, Variant, paged_attention
from kernels.paged_batch import PagedBatch
from services.model_executor.kv_cache import LayerShape

IMPLEMENTATION = "headrace_paged"  # no mask function has this name, so no mask is made


class Unsupported(Exception):
    """The model does something that paged attention has no form of; the text says what."""


class AttentionPass(Protocol):
    """One iteration's attention, and what the model's trunk made of it, once it has run."""

    trunk_output: Any

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """[heads or kv heads, tokens, head dim] each -> [tokens, heads, value head dim]."""


class CachedPass:
    """Attention over the paged cache."""

    def __init__(self, batch: PagedBatch, caches: Sequence[PagedKV]) -> None:
        self.trunk_output: Any = None
        self._batch = batch
        self._caches = caches

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        return paged_attention(query, key, value, self._caches[layer], self._batch, variant)


class ProbePass:
    """No attention: notes the shapes of what a cache must hold, before there is one."""

    def __init__(self) -> None:
        self.trunk_output: Any = None
        self._shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    @property
    def layers(self) -> list[LayerShape]:
        """By number; raises Unsupported."""
        if not self._shapes or sorted(self._shapes) != list(range(len(self._shapes))):
            raise Unsupported(f"attention layers are numbered {sorted(self._shapes)}")
        return [self._shapes[layer] for layer in range(len(self._shapes))]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        if layer in self._shapes:
            raise Unsupported(f"attention layer {layer} is called twice")
        self._shapes[layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2])
        self.windows[layer] = variant.window
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_pass: AttentionPass | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """query, key, value: [1, heads or kv heads, tokens, head dim]."""
    if attention_pass is None:
        raise Unsupported("arguments do not reach its attention layers")
    if attention_mask is not None or position_bias is not None:
        raise Unsupported("attention with a mask or bias of its own")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise Unsupported("attention that is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    variant = Variant(scale, sliding_window, softcap, s_aux)
    layer: Any = getattr(module, "layer_idx", None)
    if layer is None:
        raise Unsupported("attention layers without numbers")
    return attention_pass.attend(layer, query[0], key[0], value[0], variant)[None], None


def forward(
    model: Any, token_ids: Tensor, positions: Tensor, wanted: Tensor, attention_pass: AttentionPass
) -> Tensor:
    """Logits [wanted, vocabulary] of a flat batch.

    token_ids (integers) and positions (int64): [1, tokens]; wanted: int64 indices of the tokens
    whose logits are computed.
    """
    output = model(
        input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=wanted,
        attention_pass=attention_pass,
    )
    logits: Tensor = output.logits[0]
    return logits


def register() -> None:
    """Make the implementation known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, _forward)

"""A model as a trunk, which computes hidden states, and a head that makes logits of them.

The trunk is run once for an iteration. The head is run once for the rows that sample, and again
for other tokens that somebody wants to hear of, part by part: all logits of a long prompt at once
would not fit into memory. Heads scale and cap their logits in many ways, so it is always the
model's own forward call that is made, and only its trunk repeats what it has computed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from services.model_executor.attention import AttentionPass, Unsupported, forward


def remember_trunk(model: Any) -> None:
    """From now on the model's trunk runs once for each `AttentionPass`; raises Unsupported."""
    trunk = model.get_decoder()
    if trunk is model:
        raise Unsupported("a head that cannot be told from its trunk")
    run = trunk.forward

    def run_once(*args: Any, attention_pass: AttentionPass | None = None, **kwargs: Any) -> Any:
        if attention_pass is None:  # the model keeps its arguments: attention will say so
            return run(*args, **kwargs)
        if attention_pass.trunk_output is None:
            output = run(*args, attention_pass=attention_pass, **kwargs)
            attention_pass.trunk_output = output
        return attention_pass.trunk_output

    trunk.forward = run_once


class Iteration:
    """A flat batch in a model with such a trunk."""

    def __init__(
        self, model: Any, token_ids: Tensor, positions: Tensor, attention_pass: AttentionPass
    ) -> None:
        """token_ids (integers) and positions (int64): [tokens]."""
        self._model = model
        self._token_ids = token_ids[None]
        self._positions = positions[None]
        self._attention_pass = attention_pass

    def logits(self, wanted: Tensor) -> Tensor:
        """[wanted, vocabulary]; wanted: int64 indices of tokens."""
        return forward(self._model, self._token_ids, self._positions, wanted, self._attention_pass)

    def hidden(self, wanted: Tensor) -> Tensor:
        """What the head sees of tokens: [wanted, hidden size]. Only after `logits`."""
        states: Tensor = self._attention_pass.trunk_output[0]
        return states[0, wanted]

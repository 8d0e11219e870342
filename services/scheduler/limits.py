"""What an executor has room for: whom it can serve at all, and how far."""

from __future__ import annotations

from services.scheduler.sequence import Sequence
from shared.messages import Announce, Failure


class Limits:
    """Those of one executor."""

    def __init__(self, capacity: Announce) -> None:
        self._capacity = capacity
        # Tokens whose KV fits into the whole cache.
        self.max_tokens_held = capacity.num_blocks * capacity.block_size
        # Tokens of the longest sequence: of its last one the KV is never stored.
        self.max_length = min(capacity.max_model_len, self.max_tokens_held + 1)

    def hold(self, sequence: Sequence) -> bool:
        """Whether there is room for all that it may become."""
        return (
            sequence.num_prompt + sequence.max_tokens <= self.max_length
            and sequence.num_prompt <= self.max_tokens_held
        )

    def fit(self, sequence: Sequence) -> Failure | None:
        """Set its `max_tokens` to what was asked and there is room for, or say why it cannot be."""
        ids, vocab_size = sequence.token_ids, self._capacity.vocab_size
        if min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
            return Failure(400, f"token ids must be from 0 to {vocab_size - 1} here")
        prompt, asked = sequence.num_prompt, sequence.asked.max_tokens
        needed = sequence.output_tokens + 1 if asked is None else asked
        if prompt < 1 or needed < 0:
            return Failure(400, "a request needs a prompt, and no less than 0 tokens to generate")
        room = self.max_length - prompt
        if needed > room or prompt > self.max_tokens_held:
            return self._too_long(prompt, needed)
        sequence.limit(room if asked is None else asked)
        if sequence.num_tokens > sequence.num_inputs:
            return Failure(400, "this request has all its tokens")
        return None

    def _too_long(self, prompt: int, needed: int) -> Failure:
        return Failure(
            400,
            f"a sequence can have {self.max_length} tokens here (the KV cache holds"
            f" {self.max_tokens_held}); the request needs {prompt + needed} ({prompt}"
            f" in the prompt, {needed} to generate)",
            code="context_length_exceeded",
        )

"""Decoding by the library itself, for decoders whose rules are not known here.

A few tokens before the new ones give them their context, as the library's own streams do.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

CONTEXT = 6  # tokens
MAX_PENDING = 8  # tokens; a character needs fewer, so what is still broken then stays so


class WindowDecoder:
    """Exact wherever a token's text depends on few tokens before it."""

    __slots__ = ("_context", "_context_text", "_decode", "_pending")

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

        self._decode = decode
        self._context = list(prompt[-CONTEXT:])
        self._context_text = decode(self._context)
        self._pending: list[int] = []

    def ahead(self, token_id: int) -> int:
        """Nothing is known of what is held back."""
        return 0

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text()
        if not text or (text.endswith("\ufffd") and len(self._pending) < MAX_PENDING):
            self._pending = self._pending[-MAX_PENDING:]
            return ""
        self._context = (self._context + self._pending)[-CONTEXT:]
        self._context_text = self._decode(self._context)
        self._pending = []
        return text

    def flush(self) -> str:
        return self._text() if self._pending else ""

    def _text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._context_text) :]

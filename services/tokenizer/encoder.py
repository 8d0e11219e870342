"""Text to token ids and back, by the tokenizer.json of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from shared.types import Int32s, int32s

# The service has threads of its own; the library's would take all cores from the model.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Encoder:
    """A tokenizer whose calls let other threads run: only its batch calls do."""

    def __init__(self, path: Path) -> None:
        """Reads `path`/tokenizer.json; raises ValueError."""
        try:
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Text to id of the tokens that are no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Int32s]:
        """Raises ValueError if one of the texts cannot be encoded."""
        try:
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except Exception as error:  # the library raises nothing more special
            raise ValueError(str(error)) from error
        return [int32s(encoding.ids) for encoding in encodings]

    def decode(self, token_ids: Int32s) -> str:
        """The text of the ids, special tokens included."""
        ids = token_ids.tolist()
        texts: list[str] = self._tokenizer.decode_batch([ids], skip_special_tokens=False)
        return texts[0]

"""Token ids to text, one at a time, for whatever decoder a tokenizer has.

What a decoder has returned never changes; all of it together with `flush` is what the tokenizers
library makes of the same ids at once. For the usual decoders that holds for any ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from services.detokenizer.byte_level import ByteLevelDecoder, ByteTable
from services.detokenizer.pieces import PieceDecoder, PieceTable, Rules
from services.detokenizer.window import WindowDecoder


class TokenDecoder(Protocol):
    """The decoder of one sequence."""

    def ahead(self, token_id: int) -> int:
        """How many characters will come between the text so far and where this token's begins."""
        ...

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; "" if none did."""
        ...

    def flush(self) -> str:
        """The rest, at the end of the sequence."""
        ...


class TokenBytes(dict[int, bytes]):
    """The bytes of each id, also of special ones, filled as ids are met; b"" for unknown ones."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        content = self._bytes_of(token_id)
        if content:  # else it may be one of billions beyond the vocabulary
            self[token_id] = content
        return content


class Decoders:
    """Makes the decoder of each sequence; what they have in common is kept here."""

    def __init__(self, path: Path) -> None:
        """Reads `path`/tokenizer.json; raises ValueError."""
        try:
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        # One table for each value of skip_special_tokens.
        self._tables = [self._table(frozenset()), self._table(self._special_ids)]
        self.pieces = TokenBytes(self._bytes)

    def _table(self, skipped: frozenset[int]) -> ByteTable | PieceTable | None:
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        if decoder.get("type") == "ByteLevel":
            return ByteTable(self._tokenizer, skipped)
        rules = Rules.of(decoder)
        return None if rules is None else PieceTable(self._tokenizer, rules, skipped)

    def open(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> TokenDecoder:
        """The decoder of what follows `prompt`."""
        table = self._tables[skip_special_tokens]
        if isinstance(table, ByteTable):
            return ByteLevelDecoder(table)  # no token's text depends on the one before
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if isinstance(table, PieceTable):
            return PieceDecoder(table, first=all(one in skipped for one in prompt))
        return WindowDecoder(self._tokenizer, prompt, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's name of an id."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def _bytes(self, token_id: int) -> bytes:
        """A token's own, wherever it stands: a SentencePiece keeps its space."""
        table = self._tables[False]
        if isinstance(table, ByteTable):
            return table[token_id]
        if isinstance(table, PieceTable):
            piece = table[token_id]
            return bytes((piece,)) if isinstance(piece, int) else (piece or "").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()

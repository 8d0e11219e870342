"""Decoding of byte-level BPE (GPT-2 and its descendants): tokens are bytes, text is UTF-8."""

from __future__ import annotations

import codecs

from tokenizers import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes: itself, or the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class ByteTable(dict[int, bytes]):
    """The bytes of each id, filled as ids are met; b"" for those skipped or unknown."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if token is None:  # not kept: of ids beyond the vocabulary there are billions
            return b""
        self[token_id] = content = _bytes_of(token)
        return content


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_ALPHABET.__getitem__, token))
    except KeyError:  # an added token, spelled as it is
        return token.encode()


class ByteLevelDecoder:
    """Holds back at most the 3 bytes of a character that could still be completed."""

    __slots__ = ("_decode", "_table", "_utf8")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._utf8 = _Utf8("replace")
        self._decode = self._utf8.decode

    def ahead(self, token_id: int) -> int:
        """Above 0 if the token spoils what is held back, which is text of its own then."""
        held, _ = self._utf8.getstate()
        if not held:
            return 0
        return len((held + self._table[token_id][:1]).decode(errors="replace")) - 1

    def push(self, token_id: int) -> str:
        return self._decode(self._table[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)

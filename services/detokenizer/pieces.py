"""Decoding of SentencePiece vocabularies: tokens are pieces of text, or single bytes.

Two rules of theirs need care. The first piece of a text loses its leading space. And a run of byte
tokens is text only if all of it is valid UTF-8; else each of its bytes is U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STEPS = {"Replace": "R", "Metaspace": "M", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}
_KNOWN_ORDER = re.compile(r"[MR]R*B?(FS?)?")
UNKNOWN = "\ufffd"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the steps of such a decoder do."""

    replacements: tuple[tuple[str, str], ...]
    vanishing: str = ""  # a character that is dropped from the very first token
    byte_fallback: bool = False
    strip: str = ""  # a character that is cut from the start of the text,
    strip_count: int = 0  # up to so many times

    @classmethod
    def of(cls, decoder: Mapping[str, Any]) -> Rules | None:
        """The rules of tokenizer.json's decoder; None if it is of another kind."""
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        names = "".join(_STEPS.get(str(step.get("type")), "?") for step in steps)
        if not _KNOWN_ORDER.fullmatch(names):
            return None
        by_name = {step["type"]: step for step in steps}
        replaces = [step for step in steps if step["type"] == "Replace"]
        strip = by_name.get("Strip", {"content": "", "start": 0, "stop": 0})
        if strip["stop"] or any("String" not in step["pattern"] for step in replaces):
            return None
        metaspace = by_name.get("Metaspace")
        meta = metaspace["replacement"] if metaspace else ""
        keeps_first = metaspace is None or metaspace.get("prepend_scheme") == "never"
        return cls(
            replacements=(
                *([(meta, " ")] if meta else []),
                *((step["pattern"]["String"], step["content"]) for step in replaces),
            ),
            vanishing="" if keeps_first else meta,
            byte_fallback="ByteFallback" in by_name,
            strip=strip["content"],
            strip_count=strip["start"],
        )

    def piece(self, token: str, *, first: bool = False) -> str | int:
        """The text of a token, or its byte."""
        if self.byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
            return int(found[1], 16)
        if first and self.vanishing:
            token = token.replace(self.vanishing, "")
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token


class PieceTable(dict[int, str | int | None]):
    """The text or the byte of each id, filled as ids are met; None for the skipped and unknown."""

    def __init__(self, tokenizer: Tokenizer, rules: Rules, skipped: frozenset[int]) -> None:
        self.rules = rules
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | int | None:
        token = self.token(token_id)
        if token is None:  # not kept: of ids beyond the vocabulary there are billions
            return None
        self[token_id] = piece = self.rules.piece(token)
        return piece

    def token(self, token_id: int) -> str | None:
        if token_id in self._skipped:
            return None
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token


class PieceDecoder:
    """Holds back a run of byte tokens while it is valid: the next byte may spoil all of it."""

    __slots__ = ("_first", "_run", "_spoiled", "_strip", "_table", "_utf8", "_whole")

    def __init__(self, table: PieceTable, *, first: bool) -> None:
        """`first`: no text stands before."""
        self._table = table
        self._first = first
        self._strip = table.rules.strip_count if first else 0  # still to be cut, at most
        self._utf8 = _Utf8("strict")
        self._run = bytearray()  # byte tokens, so far valid
        self._whole = 0  # characters in it that are complete
        self._spoiled = False  # the run that goes on is not valid

    def ahead(self, token_id: int) -> int:
        """The characters of a run that is held back, as if no byte came to spoil it."""
        cut_off = isinstance(self._table[token_id], str) and self._utf8.getstate()[0]
        return len(self._run) if cut_off else self._whole

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece is None:
            return ""
        if self._first:
            piece = self._table.rules.piece(self._table.token(token_id) or "", first=True)
            self._first = False
        text = self._byte(piece) if isinstance(piece, int) else self._end_run() + piece
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        text = self._end_run()
        return self._stripped(text) if self._strip else text

    def _byte(self, byte: int) -> str:
        if self._spoiled:
            return UNKNOWN
        self._run.append(byte)
        try:
            self._whole += len(self._utf8.decode(bytes((byte,))))
        except UnicodeDecodeError:
            self._spoiled = True
            return UNKNOWN * self._take_run()[0]
        return ""

    def _end_run(self) -> str:
        self._spoiled = False
        if not self._run:
            return ""
        size, run = self._take_run()
        try:
            return run.decode()
        except UnicodeDecodeError:  # cut off within a character
            return UNKNOWN * size

    def _take_run(self) -> tuple[int, bytes]:
        run = bytes(self._run)
        self._run.clear()
        self._utf8.reset()
        self._whole = 0
        return len(run), run

    def _stripped(self, text: str) -> str:
        strip = self._table.rules.strip
        while self._strip and text.startswith(strip):
            text = text.removeprefix(strip)
            self._strip -= 1
        if text:
            self._strip = 0
        return text

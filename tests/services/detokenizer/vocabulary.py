"""Tokenizers of every kind of decoder, over one small vocabulary."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models

WORDS = ["▁Hello", "▁wor", "ld", "▁", "▁▁", "é", "日", "�", "a▁b", "</w>", "<0x4", "Ġx"]
SPECIALS = ["<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCABULARY = {
    token: index for index, token in enumerate([*SPECIALS, *WORDS, *BYTES, "<added>", "▁add é"])
}
FIRST_BYTE = VOCABULARY["<0x00>"]

REPLACE, FUSE = decoders.Replace("▁", " "), decoders.Fuse()
FALLBACK, STRIP = decoders.ByteFallback(), decoders.Strip(" ", 1, 0)
SENTENCEPIECE = {
    "llama": decoders.Sequence([REPLACE, FALLBACK, FUSE, STRIP]),
    "gemma": decoders.Sequence([REPLACE, FALLBACK, FUSE]),
    "metaspace": decoders.Metaspace(),
    "never": decoders.Metaspace(prepend_scheme="never"),
    "both": decoders.Sequence([decoders.Metaspace(), FALLBACK, FUSE, STRIP]),
    "replaces": decoders.Sequence([REPLACE, decoders.Replace("</w>", " !"), FALLBACK]),
}
OTHERS = {  # decoded by the library
    "wordpiece": decoders.WordPiece("##", cleanup=False),
    "strips each": decoders.Sequence([REPLACE, FALLBACK, STRIP]),
    "regex": decoders.Sequence([decoders.Replace("l+", "L"), FUSE]),
    "none": None,
}


def save(path: Path, decoder: decoders.Decoder | None) -> Path:
    """A tokenizer with the test vocabulary and this decoder."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<s>"))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens(["<added>", "▁add é"])
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def ids_of_bytes(content: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in content]

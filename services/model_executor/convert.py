"""Turns a GGUF file into a prepared model directory: `python -m ...convert FILE.gguf OUT`.

The weights are unpacked into plain safetensors. The tokenizer that transformers builds is mended
where it ignores how the file says that text is split before the merges.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FLOAT32_PARAMETERS = 1_000_000_000  # up to here float32; above it the memory matters more
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Values of `tokenizer.ggml.pre` by what they mean, as llama.cpp's vocabulary loader lists them.
SINGLE_DIGITS = {
    "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
}  # fmt: skip
GPT2_SPLIT = {
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "granite-docling",
    "jina-es", "jina-de", "roberta-bpe",
}  # fmt: skip


class UnknownSplit(ValueError):
    """The file's way of splitting text is not known; its tokens would be wrong."""


def convert(file: Path, out: Path) -> None:
    """Write the prepared directory of `file` into `out`, which may exist."""
    reader = GGUFReader(file)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    mend_split(tokenizer.backend_tokenizer, _text(reader, "tokenizer.ggml.pre"))
    tokenizer.save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=_dtype(reader)
    )
    if end_ids := _end_ids(reader):
        model.generation_config.eos_token_id = end_ids
    model.save_pretrained(out)


def mend_split(tokenizer: Tokenizer, pre: str | None) -> None:
    """Make `tokenizer` split text as `pre` says; raises UnknownSplit.

    transformers sets the splits it knows, and leaves a bare ByteLevel for all others.
    """
    if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel) or pre is None:
        return
    if pre in SINGLE_DIGITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre not in GPT2_SPLIT:
        raise UnknownSplit(f"tokenizer.ggml.pre {pre!r} is not supported")


def _dtype(reader: GGUFReader) -> torch.dtype:
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return torch.float32 if parameters <= FLOAT32_PARAMETERS else torch.bfloat16


def _end_ids(reader: GGUFReader) -> list[int]:
    fields = (reader.get_field(f"tokenizer.ggml.{key}") for key in END_KEYS)
    return sorted({int(field.contents()) for field in fields if field is not None})


def _text(reader: GGUFReader, key: str) -> str | None:
    field = reader.get_field(key)
    return None if field is None else str(field.contents())


if __name__ == "__main__":
    convert(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())

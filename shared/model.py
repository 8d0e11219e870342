"""What the services need to know of a prepared model directory, read without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# One context length, under the names that model families gave it.
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
MAX_SANE_LENGTH = 2**31 - 1  # positions are int32; tokenizers write 1e30 for "no limit"
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each weight file, for the fingerprint


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its directory describes it."""

    path: Path
    vocab_size: int  # rows of the embedding: ids are 0 .. vocab_size - 1
    max_model_len: int  # tokens, prompt and completion together
    eos_token_ids: frozenset[int]  # of config, generation config and tokenizer
    chat_template: str | None  # Jinja source
    bos_token: str  # text of the special token; "" if there is none
    eos_token: str
    model_type: str
    fingerprint: str  # the same for equal weights and configuration, 32 hex digits
    special_tokens: dict[str, int] = field(default_factory=dict, hash=False)  # text to id
    hidden_size: int = 0  # numbers in the state of a token; 0: not known


def read_model_info(path: Path, max_model_len: int | None = None) -> ModelInfo:
    """Read a prepared directory; raises ValueError if it is not one or `max_model_len` too much."""
    config = read_json(path / "config.json", required=True)
    text_config = config.get("text_config") or config
    specials = _special_tokens(path)
    tokenizer = read_json(path / "tokenizer.json")
    return ModelInfo(
        path=path,
        vocab_size=_vocab_size(path, text_config),
        hidden_size=_hidden_size(text_config),
        max_model_len=_length(path, text_config, max_model_len),
        eos_token_ids=frozenset(_eos_token_ids(path, config, text_config, tokenizer, specials)),
        chat_template=_chat_template(path),
        bos_token=specials.get("bos_token", ""),
        eos_token=specials.get("eos_token", ""),
        model_type=str(config.get("model_type", "")),
        fingerprint=_fingerprint(path),
        special_tokens=dict(_added_tokens(tokenizer, special=True)),
    )


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no file; raises ValueError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ValueError(f"{path} is missing") from None
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def weight_files(path: Path) -> list[Path]:
    """The weights of a model directory, in order of their names: safetensors only, no pickles."""
    return sorted(path.glob("*.safetensors"))


def _vocab_size(path: Path, config: dict[str, Any]) -> int:
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{path / 'config.json'} has no vocab_size")
    return size


def _hidden_size(config: dict[str, Any]) -> int:
    sizes = (config.get(key) for key in HIDDEN_KEYS)
    return next((size for size in sizes if isinstance(size, int)), 0)


def _length(path: Path, config: dict[str, Any], wanted: int | None) -> int:
    own = _own_length(path, config)
    if own is None and wanted is None:
        raise ValueError(f"{path} names no context length: give --max-model-len")
    if own is not None and wanted is not None and wanted > own:
        raise ValueError(f"--max-model-len {wanted} is more than the model's own {own}")
    return wanted or own or 0


def _own_length(path: Path, config: dict[str, Any]) -> int | None:
    for key in LENGTH_KEYS:
        if isinstance(length := config.get(key), int):
            return max(length, _stretched_length(config))
    length = read_json(path / "tokenizer_config.json").get("model_max_length")
    return int(length) if isinstance(length, int | float) and length <= MAX_SANE_LENGTH else None


def _stretched_length(config: dict[str, Any]) -> int:
    """YaRN checkpoints may still declare the length before stretching."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return 0
    return int(rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1))


def _special_tokens(path: Path) -> dict[str, str]:
    """bos_token and eos_token as text, where the tokenizer has them."""
    found = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one wins
        content = read_json(path / name)
        for key in ("bos_token", "eos_token"):
            token = content.get(key)
            if isinstance(token, dict):  # a serialized AddedToken
                token = token.get("content")
            if isinstance(token, str):
                found[key] = token
    return found


def _eos_token_ids(
    path: Path,
    config: dict[str, Any],
    text_config: dict[str, Any],
    tokenizer: dict[str, Any],
    specials: dict[str, str],
) -> Iterator[int]:
    for content in (config, text_config, read_json(path / "generation_config.json")):
        ids = content.get("eos_token_id")
        yield from (ids if isinstance(ids, list) else [] if ids is None else [ids])
    if eos := specials.get("eos_token"):
        yield from _ids_of_token(tokenizer, eos)


def _ids_of_token(tokenizer: dict[str, Any], text: str) -> Iterator[int]:
    added = dict(_added_tokens(tokenizer))
    if text in added:
        yield added[text]
        return
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocabulary, dict) and text in vocabulary:
        yield vocabulary[text]


def _added_tokens(tokenizer: dict[str, Any], *, special: bool = False) -> Iterator[tuple[str, int]]:
    """Text and id of the tokens beside the model's own; `special`: those that are no text."""
    for token in tokenizer.get("added_tokens", []):
        if token.get("special") or not special:
            yield token["content"], token["id"]


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json(path / name).get("chat_template")
        if isinstance(template, list):  # several named ones
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if isinstance(template, str):
            return template
    return None


def _fingerprint(path: Path) -> str:
    """Hashes the configuration, and of each weight file the name, the size and a few samples."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as content:
            for index in range(SAMPLES):
                content.seek(size * index // SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.model import read_model_info

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def directory(path: Path, **files: Any) -> Path:
    """A model directory; keyword `a_json` is written to a.json."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("_json", ".json").replace("_jinja", ".jinja")).write_text(text)
    return path


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    info = read_model_info(directory(tmp_path, config_json=CONFIG))
    assert (info.vocab_size, info.max_model_len, info.model_type) == (100, 64, "llama")
    assert info.eos_token_ids == {2}
    assert info.chat_template is None
    assert (info.bos_token, info.eos_token) == ("", "")


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": CONFIG}
    info = read_model_info(directory(tmp_path, config_json=config))
    assert (info.vocab_size, info.max_model_len, info.model_type) == (100, 64, "gemma3")
    assert info.eos_token_ids == {1, 2, 106}


def test_end_ids_are_the_union_of_all_places(tmp_path: Path) -> None:
    path = directory(
        tmp_path,
        config_json=CONFIG,
        generation_config_json={"eos_token_id": [3, 4]},
        tokenizer_config_json={"eos_token": {"content": "<end>"}, "bos_token": "<s>"},
        tokenizer_json={"added_tokens": [{"id": 7, "content": "<end>"}]},
    )
    info = read_model_info(path)
    assert info.eos_token_ids == {2, 3, 4, 7}
    assert (info.bos_token, info.eos_token) == ("<s>", "<end>")


def test_an_end_token_of_the_plain_vocabulary_counts_too(tmp_path: Path) -> None:
    path = directory(
        tmp_path,
        config_json=CONFIG,
        special_tokens_map_json={"eos_token": "</s>"},
        tokenizer_json={"added_tokens": [], "model": {"vocab": {"</s>": 9}}},
    )
    assert read_model_info(path).eos_token_ids == {2, 9}


@pytest.mark.parametrize("key", ["n_positions", "max_seq_len", "seq_length", "n_ctx"])
def test_other_names_of_the_length(tmp_path: Path, key: str) -> None:
    path = directory(tmp_path, config_json={"vocab_size": 5, key: 33})
    assert read_model_info(path).max_model_len == 33


def test_the_tokenizer_length_is_the_last_resort(tmp_path: Path) -> None:
    path = directory(
        tmp_path, config_json={"vocab_size": 5}, tokenizer_config_json={"model_max_length": 20}
    )
    assert read_model_info(path).max_model_len == 20


def test_without_any_length_one_must_be_given(tmp_path: Path) -> None:
    path = directory(
        tmp_path, config_json={"vocab_size": 5}, tokenizer_config_json={"model_max_length": 1e30}
    )
    with pytest.raises(ValueError, match="--max-model-len"):
        read_model_info(path)
    assert read_model_info(path, 48).max_model_len == 48


def test_yarn_stretches_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    path = directory(tmp_path, config_json={**CONFIG, "rope_scaling": rope})
    assert read_model_info(path).max_model_len == 256


def test_a_shorter_length_is_taken_and_a_longer_refused(tmp_path: Path) -> None:
    path = directory(tmp_path, config_json=CONFIG)
    assert read_model_info(path, 32).max_model_len == 32
    with pytest.raises(ValueError, match=r"65 .* 64"):
        read_model_info(path, 65)


def test_the_template_file_wins_over_the_tokenizers(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = directory(tmp_path, config_json=CONFIG, tokenizer_config_json={"chat_template": named})
    assert read_model_info(path).chat_template == "d"
    directory(tmp_path, chat_template_jinja="file")
    assert read_model_info(path).chat_template == "file"


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab_size": "many"}'])
def test_a_broken_config_is_a_value_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="config"):
        read_model_info(directory(tmp_path, config_json=text))


def test_a_missing_config_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json is missing"):
        read_model_info(tmp_path)


def test_the_fingerprint_follows_config_and_weights(tmp_path: Path) -> None:
    path = directory(tmp_path, config_json=CONFIG)
    weights = tmp_path / "model.safetensors"
    seen = [read_model_info(path).fingerprint]
    for content in (b"\0" * 500_000, b"\0" * 500_001, b"\0" * 250_000 + b"\1" * 250_000):
        weights.write_bytes(content)
        seen.append(read_model_info(path).fingerprint)
    directory(tmp_path, config_json={**CONFIG, "rope_theta": 5})
    seen.append(read_model_info(path).fingerprint)
    assert len(set(seen)) == len(seen)
    assert read_model_info(path).fingerprint == seen[-1]

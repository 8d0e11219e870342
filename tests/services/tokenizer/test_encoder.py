from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from services.tokenizer.encoder import Encoder
from shared.types import int32s


@pytest.fixture(scope="module")
def encoder(model_dir: Path) -> Encoder:
    return Encoder(model_dir)


def with_bos(path: Path) -> Path:
    """A tokenizer that puts a start token first and truncates, as Llama's may."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


# The model's vocabulary has no token for some control characters, nor for bytes above F0.
ENCODABLE = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"], include_characters="\0\t\n\r"
)


@given(st.text(ENCODABLE))
def test_what_is_encoded_decodes_to_itself(encoder: Encoder, text: str) -> None:
    [ids] = encoder.encode([text], add_special_tokens=True)
    assert encoder.decode(ids) == text


def test_texts_are_encoded_in_order(encoder: Encoder) -> None:
    texts = ["Hello world", "", "<|im_start|>user\n", "a\0b"]
    columns = encoder.encode(texts, add_special_tokens=False)
    assert [encoder.decode(column) for column in columns] == texts
    assert columns[1] == int32s()
    assert columns[2][0] == 1


def test_special_tokens_are_those_of_the_file(encoder: Encoder) -> None:
    assert encoder.special_tokens["<|im_end|>"] == 2
    assert len(encoder.special_tokens) == 17


def test_the_start_token_is_added_if_asked_for_and_nothing_is_cut(tmp_path: Path) -> None:
    encoder = Encoder(with_bos(tmp_path))
    assert encoder.encode(["a b a"], add_special_tokens=True) == [int32s([0, 1, 2, 1])]
    assert encoder.encode(["a b a"], add_special_tokens=False) == [int32s([1, 2, 1])]


def test_a_text_outside_the_vocabulary_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="UNK"):
        Encoder(with_bos(tmp_path)).encode(["a", "c"], add_special_tokens=False)


@pytest.mark.parametrize("content", [None, "{", json.dumps({"model": 5})])
def test_a_file_that_is_no_tokenizer_is_a_value_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Encoder(tmp_path)

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.detokenizer.byte_level import _ALPHABET
from services.detokenizer.decoder import Decoders, TokenDecoder
from services.detokenizer.window import CONTEXT, MAX_PENDING
from tests.services.detokenizer.vocabulary import (
    FALLBACK,
    OTHERS,
    SENTENCEPIECE,
    SPECIALS,
    STRIP,
    VOCABULARY,
    WORDS,
    ids_of_bytes,
    save,
)


@pytest.fixture(scope="module", params=SENTENCEPIECE)
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), SENTENCEPIECE[request.param])


def increments(decoder: TokenDecoder, ids: Sequence[int]) -> list[str]:
    return [decoder.push(one) for one in ids] + [decoder.flush()]


# Ids of the test vocabulary, with many bytes that are or are not characters, and unknown ids.
PIECE_IDS = st.lists(
    st.one_of(
        st.integers(0, len(VOCABULARY) + 3).map(lambda one: [one]),
        st.integers(0, len(SPECIALS + WORDS) - 1).map(lambda one: [one]),
        st.binary(max_size=6).map(ids_of_bytes),
        st.text(max_size=3).map(lambda text: ids_of_bytes(text.encode())),
    ),
    max_size=12,
).map(lambda parts: [one for part in parts for one in part])


@settings(max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_text_is_exactly_the_librarys(
    real: Decoders, library: Tokenizer, byte_ids: list[int], data: st.DataObject, skip: bool
) -> None:
    one = st.one_of(
        st.integers(0, library.get_vocab_size() + 5),
        st.sampled_from(byte_ids),
        st.sampled_from([0, 1, 2]),
    )
    ids = data.draw(st.lists(one, max_size=60))
    parts = increments(real.open([5, 6], skip_special_tokens=skip), ids)
    assert "".join(parts) == library.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300)
@given(content=st.binary(max_size=40))
def test_any_bytes_are_decoded_as_the_library_does(byte_model: Path, content: bytes) -> None:
    library = Tokenizer.from_file(str(byte_model / "tokenizer.json"))
    decoder = Decoders(byte_model).open([], skip_special_tokens=True)
    assert "".join(increments(decoder, list(content))) == library.decode(list(content))


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer whose ids are the bytes, with added tokens spelled as they are."""
    path = tmp_path_factory.mktemp("bytes")
    tokenizer = Tokenizer(models.WordLevel(_ALPHABET, unk_token="!"))
    tokenizer.add_tokens(["<add é>", "日本", "   "])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_added_tokens_stand_as_they_are_spelled(byte_model: Path) -> None:
    library = Tokenizer.from_file(str(byte_model / "tokenizer.json"))
    ids = [72, 256, 257, 0xE6, 258, 72]
    decoder = Decoders(byte_model).open([], skip_special_tokens=True)
    assert "".join(increments(decoder, ids)) == library.decode(ids)


@pytest.mark.parametrize(
    "text", ["🫠🫠🫠🫠🫠🫠", "龘", "ภาษาไทย", "မြန်မာ", "🇧🇹", "👩🏽\u200d🚀"], ids=ascii
)
def test_characters_of_several_tokens_come_whole(
    real: Decoders, library: Tokenizer, text: str
) -> None:
    ids = library.encode(text).ids
    assert len(ids) > len(text)
    parts = increments(real.open([1], skip_special_tokens=True), ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_what_is_certain_is_not_held_back(real: Decoders, byte_ids: list[int]) -> None:
    """Garbage without end: at most one character that might still become whole is missing."""
    decoder = real.open([], skip_special_tokens=True)
    ids = byte_ids * 40
    shown = sum(len(decoder.push(one)) for one in ids)
    assert len(decoder.flush()) <= 1
    assert shown > len(ids) // 2


def test_half_a_character_at_the_prompts_end_leaks_nothing(
    real: Decoders, library: Tokenizer
) -> None:
    ids = library.encode("Hello 🫠").ids
    assert library.decode(ids[:-1]).endswith("\ufffd")
    prompt, answer = ids[:-1], [*ids[-1:], *library.encode(" world").ids]
    parts = increments(real.open(prompt, skip_special_tokens=True), answer)
    assert "".join(parts) == library.decode(answer)
    assert "Hello" not in "".join(parts)


@settings(max_examples=400)
@given(ids=PIECE_IDS, skip=st.booleans())
def test_sentencepiece_text_is_exactly_the_librarys(
    pieces: Path, ids: list[int], skip: bool
) -> None:
    library = Tokenizer.from_file(str(pieces / "tokenizer.json"))
    parts = increments(Decoders(pieces).open([], skip_special_tokens=skip), ids)
    assert "".join(parts) == library.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200)
@given(prompt=PIECE_IDS, ids=PIECE_IDS, skip=st.booleans())
@example(prompt=[0], ids=[2, 2], skip=True)
@example(prompt=[4], ids=[2, 2], skip=True)
def test_the_first_word_after_a_prompt_keeps_its_space(
    pieces: Path, prompt: list[int], ids: list[int], skip: bool
) -> None:
    """As if the library had decoded both; a prompt that ends in a byte gives none of it away."""
    library = Tokenizer.from_file(str(pieces / "tokenizer.json"))
    context = [4] if any(not (skip and one < len(SPECIALS)) for one in prompt) else []
    base = library.decode(context, skip_special_tokens=skip)
    expected = library.decode(context + ids, skip_special_tokens=skip)[len(base) :]
    parts = increments(Decoders(pieces).open(prompt, skip_special_tokens=skip), ids)
    assert "".join(parts) == expected


def test_a_spoiled_run_of_bytes_is_not_held_back(pieces: Path) -> None:
    library = Tokenizer.from_file(str(pieces / "tokenizer.json"))
    ids = ids_of_bytes("é".encode() + b"\xff" * 1000)
    decoder = Decoders(pieces).open([4], skip_special_tokens=True)
    shown = "".join(decoder.push(one) for one in ids)
    assert shown == library.decode([4, *ids]).removeprefix(library.decode([4]))
    assert decoder.flush() == ""


@pytest.mark.parametrize("name", OTHERS)
@given(ids=st.lists(st.integers(0, len(SPECIALS + WORDS) - 1), max_size=20))
def test_other_decoders_are_left_to_the_library(
    tmp_path_factory: pytest.TempPathFactory, name: str, ids: list[int]
) -> None:
    path = save(tmp_path_factory.mktemp("model"), OTHERS[name])
    library = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompt = [2, 3]
    base = library.decode(prompt)
    parts = increments(Decoders(path).open(prompt, skip_special_tokens=True), ids)
    assert "".join(parts) == library.decode(prompt + ids)[len(base) :]


def test_the_librarys_window_is_bounded(tmp_path: Path) -> None:
    path = save(tmp_path, decoders.Sequence([FALLBACK, STRIP]))
    decoder = Decoders(path).open(ids_of_bytes(b"\xff" * 100), skip_special_tokens=True)
    for byte in ids_of_bytes(b"\xff" * 100):
        decoder.push(byte)
        assert len(decoder._context) <= CONTEXT  # type: ignore[attr-defined]
        assert len(decoder._pending) <= MAX_PENDING  # type: ignore[attr-defined]


def test_a_file_that_is_no_tokenizer_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Decoders(tmp_path)

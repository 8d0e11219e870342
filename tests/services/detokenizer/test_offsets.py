"""Where each token's text begins, and which bytes it is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.detokenizer.decoder import Decoders
from tests.services.detokenizer.vocabulary import (
    OTHERS,
    SENTENCEPIECE,
    VOCABULARY,
    ids_of_bytes,
    save,
)


def read(decoders: Decoders, ids: list[int], *, skip: bool = False) -> tuple[str, list[int]]:
    """The text, and where the text of each token begins."""
    decoder = decoders.open([], skip_special_tokens=skip)
    text, offsets = "", []
    for one in ids:
        offsets.append(len(text) + decoder.ahead(one))
        text += decoder.push(one)
    return text + decoder.flush(), offsets


def character_of_each_byte(content: bytes) -> list[int]:
    """Which character of the text, in which broken parts are one U+FFFD each, it belongs to."""
    places: list[int] = []
    for size in range(1, len(content) + 1):
        # The character of the last byte is complete or broken for want of more.
        places.append(len(content[:size].decode(errors="replace")) - 1)
    return places


@settings(max_examples=300)
@given(data=st.data())
def test_byte_level_tokens_begin_where_their_first_byte_stands(
    real: Decoders, library: Tokenizer, byte_ids: list[int], data: st.DataObject
) -> None:
    one = st.one_of(st.integers(0, library.get_vocab_size() - 1), st.sampled_from(byte_ids))
    ids = data.draw(st.lists(one, max_size=40))
    text, offsets = read(real, ids)
    pieces = [real.pieces[one] for one in ids]
    content = b"".join(pieces)
    assert text == content.decode(errors="replace")
    places = character_of_each_byte(content)
    starts = [sum(map(len, pieces[:place])) for place in range(len(ids))]
    assert offsets == [places[start] for start in starts]


def test_a_character_of_several_tokens_stands_where_they_all_say(
    real: Decoders, library: Tokenizer
) -> None:
    ids = library.encode("a🫠b").ids
    text, offsets = read(real, ids)
    assert (text, offsets) == ("a🫠b", [0, *[1] * (len(ids) - 2), 2])


def test_special_tokens_have_bytes_even_where_they_have_no_text(real: Decoders) -> None:
    text, offsets = read(real, [81, 2, 81], skip=True)
    assert (text, offsets) == ("aa", [0, 1, 1])
    assert real.pieces[2] == b"<|im_end|>"
    assert real.pieces[10**6] == b""


@pytest.fixture(scope="module", params=["llama", "gemma", "both"])
def pieced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    return Decoders(save(tmp_path_factory.mktemp("model"), SENTENCEPIECE[request.param]))


@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(["▁Hello", "▁wor", "ld", "é", "日", "<added>"]).map(
                lambda token: [VOCABULARY[token]]
            ),
            st.text(st.characters(exclude_characters=" ", codec="utf-8"), max_size=3).map(
                lambda text: ids_of_bytes(text.encode())
            ),
        ),
        max_size=12,
    )
)
def test_sentencepiece_tokens_begin_where_their_text_stands(
    pieced: Decoders, parts: list[list[int]]
) -> None:
    """The first word's space is in its bytes alone."""
    ids = [one for part in parts for one in part]
    text, offsets = read(pieced, ids)
    pieces = [pieced.pieces[one] for one in ids]
    content = b"".join(pieces)
    whole = content.decode()
    dropped = len(whole) - len(text)
    assert whole == " " * dropped + text
    assert dropped <= 1
    starts = [sum(map(len, pieces[:place])) for place in range(len(ids))]
    places = character_of_each_byte(content)
    assert offsets == [max(places[start] - dropped, 0) for start in starts]


def test_a_sentencepiece_keeps_its_space_and_a_byte_is_a_byte(tmp_path: Path) -> None:
    decoders = Decoders(save(tmp_path, SENTENCEPIECE["llama"]))
    names = ["▁Hello", "<0xE6>", "</s>", "<added>"]
    pieces = [decoders.pieces[VOCABULARY[name]] for name in names]
    assert pieces == [b" Hello", b"\xe6", b"</s>", b"<added>"]
    assert decoders.pieces[10**6] == b""


def test_a_broken_run_counts_each_of_its_bytes(tmp_path: Path) -> None:
    decoders = Decoders(save(tmp_path, SENTENCEPIECE["llama"]))
    ids = [VOCABULARY["▁Hello"], *ids_of_bytes("é日".encode()[:-1]), VOCABULARY["ld"]]
    text, offsets = read(decoders, ids)
    assert text == "Hello" + "\ufffd" * 4 + "ld"
    assert offsets[-1] == text.index("ld")


@pytest.mark.parametrize("name", OTHERS)
def test_other_decoders_have_bytes_and_places_too(tmp_path: Path, name: str) -> None:
    decoders = Decoders(save(tmp_path, OTHERS[name]))
    ids = [VOCABULARY[token] for token in ("▁Hello", "▁wor", "ld")]
    text, offsets = read(decoders, ids)
    decode = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode
    assert [decoders.pieces[one] for one in ids] == [decode([one]).encode() for one in ids]
    assert offsets == [len(decode(ids[:place])) for place in range(len(ids))]
    assert text == decode(ids)

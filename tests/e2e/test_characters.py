"""Characters of several tokens, prompts that end inside one, and special tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.harness import RunningMesh
from tests.e2e.reference import Reference
from tests.e2e.sse import stream

TOKENS = 30
TEXTS = ["🫠🫠🫠🫠🫠🫠", "𠮷野家", "สวัสดีครับ", "မင်္ဂလာပါ", "🇨🇭🇨🇭🇨🇭", "👩🏽‍🚀👩🏽‍🚀", "naïve café"]


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, str]:
    """What transformers says to each of `TEXTS`."""
    ids = [reference.tokenizer.encode(text).ids for text in TEXTS]
    return dict(zip(TEXTS, [one.text for one in reference.expect(ids, TOKENS)], strict=True))


@pytest.mark.parametrize("prompt", TEXTS)
def test_streams_hold_whole_characters(
    mesh: RunningMesh, expected: dict[str, str], prompt: str
) -> None:
    """R007"""
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(mesh.text, prompt, max_tokens=TOKENS)
        streamed = stream(mesh, prompt=prompt, temperature=0, max_tokens=TOKENS)
    whole = asked.result()
    assert streamed.text == whole == expected[prompt]
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in streamed.pieces)


def test_a_prompt_that_ends_inside_a_character(mesh: RunningMesh, reference: Reference) -> None:
    """R008: the prompt is not repeated in the first delta."""
    ids = reference.tokenizer.encode("Hello 𠮷").ids[:-1]
    streamed = stream(mesh, prompt=ids, temperature=0, max_tokens=4)
    assert "Hello" not in streamed.text
    assert streamed.text == mesh.text(ids, max_tokens=4)


@pytest.mark.parametrize("text", [*TEXTS, " leading", "two\n\nlines", "12345", "<|im_end|>"])
def test_tokenize_and_back(mesh: RunningMesh, reference: Reference, text: str) -> None:
    answer = mesh.post("/tokenize", prompt=text).json()
    assert answer["tokens"] == reference.tokenizer.encode(text).ids
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    assert mesh.post("/detokenize", tokens=answer["tokens"]).json()["prompt"] == text


def test_each_digit_is_a_token(mesh: RunningMesh) -> None:
    assert mesh.post("/tokenize", prompt="1234567890").json()["count"] == 10

"""Stop strings, stop token ids, end ids: where a text ends, and what is sent of it."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.harness import RunningMesh
from tests.e2e.sse import stream

PROMPT = "one two three four"
CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "temperature": 0}


@pytest.fixture(scope="module")
def whole(session_mesh: RunningMesh) -> str:
    return session_mesh.text(PROMPT, max_tokens=40)


def windows(text: str) -> list[str]:
    """Stop strings of 2 to 12 characters, cut out of all over the text."""
    starts = range(0, len(text) - 12, max(1, (len(text) - 12) // 30))
    lengths = itertools.cycle(range(2, 13))
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def test_no_part_of_a_stop_string_is_sent(mesh: RunningMesh, whole: str) -> None:
    """R001"""

    def check(stop: str) -> None:
        expected = whole[: whole.index(stop)]
        streamed = stream(mesh, prompt=PROMPT, temperature=0, max_tokens=40, stop=[stop])
        assert streamed.text == expected, stop
        assert streamed.finish_reason == "stop"
        for end in range(len(streamed.pieces)):
            assert expected.startswith("".join(streamed.pieces[:end]))

    with ThreadPoolExecutor(16) as pool:
        assert len(list(pool.map(check, windows(whole)))) >= 30


def test_inside_a_token_and_over_many(mesh: RunningMesh, whole: str) -> None:
    """R002"""
    letters = [whole[at : at + 1] for at in range(8, 20) if whole[at].isalnum()]
    for stop in (*letters[:4], whole[5:30]):
        answer = mesh.complete(PROMPT, max_tokens=40, stop=stop)
        choice = answer["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == stop
        assert answer["usage"]["completion_tokens"] < 40


def test_included_on_request(mesh: RunningMesh, whole: str) -> None:
    stop = whole[10:14]
    text = mesh.text(PROMPT, max_tokens=40, stop=stop, include_stop_str_in_output=True)
    assert text == whole[: whole.index(stop) + 4]


def test_text_that_did_not_become_a_stop_string_is_released(mesh: RunningMesh, whole: str) -> None:
    assert mesh.text(PROMPT, max_tokens=40, stop=[whole[-5:] + "#", whole[10:20] + "#"]) == whole


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop(mesh: RunningMesh, whole: str, stop: Any) -> None:
    """R034"""
    assert mesh.text(PROMPT, max_tokens=40, stop=stop) == whole


@pytest.mark.parametrize("stop", ["", [""], [5], 5, ["x"] * 17, {"a": 1}])
def test_bad_stop(mesh: RunningMesh, stop: Any) -> None:
    """R034: an empty text is refused, up to 16 are allowed."""
    response = mesh.post("/v1/completions", prompt=PROMPT, stop=stop)
    assert response.status_code == 400
    assert "stop" in response.json()["error"]["param"]
    assert mesh.post("/v1/completions", prompt=PROMPT, stop=["#"] * 16).status_code == 200


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_special_token_as_stop_string(mesh: RunningMesh, skip: bool, include: bool) -> None:
    """R032: the model ends its turn by itself; only the stop string may end it here."""
    plain = mesh.post("/v1/chat/completions", **CHAT, max_tokens=80).json()["choices"][0]
    assert plain["finish_reason"] == "stop"
    choice = mesh.post(
        "/v1/chat/completions",
        **CHAT,
        max_tokens=80,
        ignore_eos=True,
        stop=["<|im_end|>"],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
    ).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    mark = "<|im_end|>" if include and not skip else ""
    assert choice["message"]["content"] == plain["message"]["content"] + mark


def test_stop_token_ids(mesh: RunningMesh, whole: str) -> None:
    ids = mesh.post("/tokenize", prompt=whole).json()["tokens"]
    answer = mesh.complete(PROMPT, max_tokens=40, stop_token_ids=[ids[6]])
    count = answer["usage"]["completion_tokens"]
    assert count == ids.index(ids[6]) + 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == ids[6]
    assert whole.startswith(answer["choices"][0]["text"])


def test_min_tokens(mesh: RunningMesh, whole: str) -> None:
    """Before min_tokens neither end ids nor stop strings count."""
    ids = mesh.post("/tokenize", prompt=whole).json()["tokens"]
    answer = mesh.complete(PROMPT, max_tokens=40, min_tokens=20, stop_token_ids=[ids[2]])
    assert answer["usage"]["completion_tokens"] >= 20
    answer = mesh.complete(PROMPT, max_tokens=40, min_tokens=30, stop=[whole[3:6]])
    assert answer["usage"]["completion_tokens"] >= 30


def test_ignore_eos(mesh: RunningMesh) -> None:
    answer = mesh.post("/v1/chat/completions", **CHAT, max_tokens=80, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 80
    assert answer["choices"][0]["finish_reason"] == "length"

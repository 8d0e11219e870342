"""What is said of tokens: OpenAI's and vLLM's forms, the same in pieces as at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.logprobs import as_id, as_key, as_text, chat_logprobs, completion_logprobs
from services.gateway.request import Tell
from services.gateway.telling import Form, Teller
from services.gateway.tokens import Span, Token, read_tokens
from tests.services.gateway.details import Spoken, details

# "a", the first two bytes of a sign of three, its last one, and an alternative to each.
PROMPT = [
    Spoken(7, b"a"),
    Spoken(8, b"\xe2\x82", 1, 2, [(8, b"\xe2\x82", -1.5), (7, b"a", -0.5), (8, b"\xe2\x82", -1.5)]),
]
OUTPUT = [
    Spoken(9, b"\xac", 1, 1, [(9, b"\xac", -0.25), (9, b"\xac", -0.25), (10, b" b", -2.0)]),
    Spoken(10, b" b", 2, 1, [(10, b" b", -0.125), (10, b" b", -0.125), (11, b" c", -3.0)]),
]
TOKENS = read_tokens([Span(details([*PROMPT, *OUTPUT], 0), 0)])


def told(tell: Tell, form: Form = completion_logprobs, tokens: list[Token] = TOKENS) -> Any:
    return Teller(tell, form, as_key).told(tokens, len(PROMPT))


def test_details_become_tokens() -> None:
    tokens = read_tokens([Span(details(PROMPT, 0), 1), Span(details(OUTPUT, 2), 0)])
    assert tokens == TOKENS[1:]
    assert [token.position for token in TOKENS] == [0, 1, 2, 3]
    assert [token.logprob for token in TOKENS] == [None, -1.5, -0.25, -0.125]
    assert TOKENS[2].top[1] == (10, b" b", -2.0)


def test_names() -> None:
    assert [as_key(0, piece) for piece in (b" a", b"\xe2\x82", b"")] == [
        " a",
        "bytes:\\xe2\\x82",
        "",
    ]
    assert [as_text(0, piece) for piece in (b" a", b"\xe2\x82")] == [" a", "\ufffd"]
    assert as_id(5, b"x") == "token_id:5"


def test_completions() -> None:
    """R026, R029: the first of a prompt has nothing before it."""
    assert told(Tell(logprobs=1, of_prompt=True)).logprobs == {
        "tokens": ["a", "bytes:\\xe2\\x82", "bytes:\\xac", " b"],
        "token_logprobs": [None, -1.5, -0.25, -0.125],
        "top_logprobs": [
            None,
            {"bytes:\\xe2\\x82": -1.5, "a": -0.5},
            {"bytes:\\xac": -0.25},
            {" b": -0.125},
        ],
        "text_offset": [0, 1, 1, 2],
    }
    output = told(Tell(logprobs=2)).logprobs
    assert output["tokens"] == ["bytes:\\xac", " b"]
    assert output["top_logprobs"][1] == {" b": -0.125, " c": -3.0}
    assert told(Tell(logprobs=0)).logprobs["top_logprobs"] == [
        {"bytes:\\xac": -0.25},
        {" b": -0.125},
    ]


def test_a_token_wins_over_another_of_its_text() -> None:
    spoken = [Spoken(1, b"x", 0, 2, [(1, b"x", -2.0), (2, b"x", -1.0), (1, b"x", -2.0)])]
    tokens = read_tokens([Span(details(spoken, 5), 0)])
    assert told(Tell(logprobs=2), tokens=tokens).logprobs["top_logprobs"] == [{"x": -2.0}]


def test_chats() -> None:
    """R026"""
    teller = Teller(Tell(logprobs=1), chat_logprobs, as_text)
    assert teller.told(TOKENS, len(PROMPT)).logprobs == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -0.25,
                "bytes": [0xAC],
                "top_logprobs": [{"token": "\ufffd", "logprob": -0.25, "bytes": [0xAC]}],
            },
            {
                "token": " b",
                "logprob": -0.125,
                "bytes": [32, 98],
                "top_logprobs": [{"token": " b", "logprob": -0.125, "bytes": [32, 98]}],
            },
        ],
        "refusal": None,
    }
    for entry in told(Tell(logprobs=0), chat_logprobs).logprobs["content"]:
        assert entry["top_logprobs"] == []


def test_prompts() -> None:
    assert told(Tell(prompt_logprobs=1)).of_prompt == {
        "prompt_logprobs": [
            None,
            {
                "8": {"logprob": -1.5, "rank": 2, "decoded_token": "\ufffd"},
                "7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            },
        ]
    }
    assert told(Tell(prompt_logprobs=0)).of_prompt["prompt_logprobs"][1].keys() == {"8"}


def test_ids() -> None:
    found = told(Tell(token_ids=True))
    assert (found.logprobs, found.in_choice) == (None, {"token_ids": [9, 10]})
    assert found.of_prompt == {"prompt_token_ids": [7, 8]}
    named = told(Tell(logprobs=1, ids_as_names=True)).logprobs
    assert named["tokens"] == ["token_id:9", "token_id:10"]
    assert named["top_logprobs"][0] == {"token_id:9": -0.25}


@given(
    st.sets(st.integers(1, 3)),
    st.sampled_from([completion_logprobs, chat_logprobs]),
    st.booleans(),
)
def test_pieces_give_the_same_as_the_whole(cuts: set[int], form: Form, of_prompt: bool) -> None:
    tell = Tell(logprobs=2, of_prompt=of_prompt, prompt_logprobs=1, token_ids=True)
    places = [0, *sorted(cuts), len(TOKENS)]
    pieces = [told(tell, form, TOKENS[start:end]) for start, end in pairwise(places)]
    joined: dict[str, list[Any]] = {}
    for piece in pieces:
        for part in (piece.logprobs or {}, piece.in_choice, piece.of_prompt):
            for name, values in part.items():
                joined.setdefault(name, []).extend(values or [])
    whole = told(tell, form)
    expected = {**whole.logprobs, **whole.in_choice, **whole.of_prompt}
    assert joined == {name: values or [] for name, values in expected.items()}


@pytest.mark.parametrize("tell", [Tell(), Tell(token_ids=True), Tell(logprobs=1)])
def test_no_tokens(tell: Tell) -> None:
    found = told(tell, tokens=[])
    assert (found.logprobs, found.of_prompt) == (None, {})

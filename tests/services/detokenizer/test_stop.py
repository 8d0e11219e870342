from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.detokenizer.stop import StopMatcher

AB = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=16)


def expected(text: str, stops: list[str], start: int = 0) -> tuple[str, str | None]:
    """Text up to the match that ends first at or behind `start`, by looking at every place."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, parts: list[str]) -> tuple[list[str], str | None]:
    """What is sent after each part and at the end, and the stop string."""
    sent = []
    for part in parts:
        text, stop = matcher.feed(part)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.flush()], None


def cut(text: str, places: list[int]) -> list[str]:
    """The text in parts."""
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(AB, STOPS, st.lists(st.integers(0, 100)))
@example("aab", ["aaab", "ab"], [1, 2])
@example("abab", ["abb", "baba"], [])
def test_the_first_match_counts_however_the_text_is_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    sent, stop = run(StopMatcher(stops, include=False), cut(text, places))
    assert ("".join(sent), stop) == expected(text, stops)


@given(AB, STOPS, st.lists(st.integers(0, 100)))
def test_nothing_that_could_be_a_stop_string_is_sent_and_nothing_else_held(
    text: str, stops: list[str], places: list[int]
) -> None:
    matcher = StopMatcher(stops, include=False)
    seen = sent = ""
    for part in cut(text, places):
        new, stop = matcher.feed(part)
        sent += new
        seen += part
        assert expected(text, stops)[0].startswith(sent)
        if stop is not None:
            break
        longest = max(
            size for one in stops for size in range(len(one)) if seen.endswith(one[:size])
        )
        assert len(seen) - len(sent) == longest


@given(AB, STOPS, st.lists(st.integers(0, 100)))
def test_the_stop_string_is_included_if_asked_for(
    text: str, stops: list[str], places: list[int]
) -> None:
    sent, stop = run(StopMatcher(stops, include=True), cut(text, places))
    before, found = expected(text, stops)
    assert ("".join(sent), stop) == (before + (found or ""), found)


@given(AB, AB, STOPS)
@example("ab", "b", ["abb"])
@example("aa", "a", ["aa"])
def test_a_match_counts_only_where_it_ends_in_armed_text(
    early: str, late: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops, include=False)
    first, none = matcher.feed(early, armed=False)
    second, stop = matcher.feed(late)
    assert none is None
    if stop is None:
        second += matcher.flush()
    assert (first + second, stop) == expected(early + late, stops, len(early))


@pytest.mark.parametrize(
    ("parts", "stop", "sent"),
    [
        (["one two", " three"], "o t", ["one tw", ""]),  # over a border
        (["abcdefg"], "cd", ["ab"]),  # inside one token
        (list("abcdefghij"), "cdefgh", ["a", "b", "", "", "", "", "", ""]),  # over many
        (["x#", "#", "y"], "###", ["x", "", "##y", ""]),  # held back, then released
        (["日本語"], "本", ["日"]),
    ],
)
def test_examples(parts: list[str], stop: str, sent: list[str]) -> None:
    got, _ = run(StopMatcher([stop], include=False), parts)
    assert got == sent


@pytest.mark.parametrize("stop", ["]x", "^x", "-x", "\\x", "[x", ".x", " x", "\nx", "日x"])
def test_any_character_may_begin_a_stop_string(stop: str) -> None:
    matcher = StopMatcher(["a-z", stop], include=False)
    assert run(matcher, ["0", "8", stop[0], "x", "9"]) == (["0", "8", "", ""], stop)


def test_every_place_of_a_text_is_found_in_every_cut() -> None:
    """Stop strings cut out of a text at any place, of any length, with tokens of any length."""
    text = "one two three four, five: six\n\nseven"
    for size in range(1, 13):
        parts = [text[place : place + size] for place in range(0, len(text), size)]
        for start in range(len(text)):
            for length in range(1, 13):
                stop = text[start : start + length]
                sent, found = run(StopMatcher([stop], include=False), parts)
                assert ("".join(sent), found) == (text[: text.index(stop)], stop)


def test_empty_stop_strings_never_match() -> None:
    assert run(StopMatcher(["", ""], include=False), ["abc"]) == (["abc", ""], None)


def test_the_worst_text_takes_steps_in_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed comparison shortens the match, so there are at most two for each character."""
    matcher = StopMatcher(["a" * 500 + "b"], include=False)
    [pattern] = matcher._patterns
    looked = 0

    class Counting(list[int]):
        def __getitem__(self, key: object) -> int:  # type: ignore[override]
            nonlocal looked
            looked += 1
            return super().__getitem__(key)  # type: ignore[no-any-return, call-overload]

    pattern._borders = Counting(pattern._borders)
    text = ("a" * 499 + "c") * 20
    for character in text:
        matcher.feed(character)
    assert looked <= len(text)

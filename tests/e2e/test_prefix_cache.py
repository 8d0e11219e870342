"""The prefix cache of a whole mesh: what is found, and that no answer changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import MODEL, RunningMesh, running_mesh
from tests.e2e.sse import stream

BLOCK = 16  # tokens
TOKENS = 6
TOLERANCE = 1e-3
FLAGS = ("--dtype", "float32", "--max-num-batched-tokens", str(2 * BLOCK))


@pytest.fixture(scope="module")
def caching(model_dir: Path) -> Iterator[RunningMesh]:
    """Prompts are computed in chunks of two blocks."""
    with running_mesh(model_dir, *FLAGS) as mesh:
        yield mesh
        mesh.wait_idle()


def prompt_of(tokens: int, start: int) -> list[int]:
    """Ids of which no two prompts share a block, unless their starts are the same."""
    return [start + (7 * place) % 400 for place in range(tokens)]


@dataclass(frozen=True, eq=False)
class Said:
    """A text with its logprobs, which may differ by what rounding comes to."""

    text: str
    logprobs: list[float]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Said):
            return NotImplemented
        close = pytest.approx(other.logprobs, abs=TOLERANCE)
        return self.text == other.text and bool(self.logprobs == close)


def answer(mesh: RunningMesh, prompt: list[int], **options: Any) -> tuple[Said, int]:
    """What was said, and how many tokens of the prompt were cached."""
    body = mesh.complete(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=0, **options)
    choice, usage = body["choices"][0], body["usage"]
    said = Said(choice["text"], choice["logprobs"]["token_logprobs"])
    assert len(said.logprobs) == TOKENS
    return said, usage["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_of_ten_blocks_is_found_in_the_default_mode(caching: RunningMesh) -> None:
    """R077: results that come late, and chunks, hide nothing."""
    prompt = prompt_of(10 * BLOCK + 1, 1000)
    names = [f"headrace_prefix_cache_{kind}_total" for kind in ("queries", "hits")]
    before = [caching.metric(name) for name in names]
    first, second = (answer(caching, prompt) for _ in range(2))
    assert (first[1], second[1]) == (0, 10 * BLOCK)
    assert first[0] == second[0]
    added = [caching.metric(name) - was for name, was in zip(names, before, strict=True)]
    assert added == [2 * len(prompt), 10 * BLOCK]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    options |= {"stream_options": {"include_usage": True}}
    streamed = stream(caching, prompt=prompt, **options)
    assert streamed.text == first[0].text
    usage = streamed.events[-1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10 * BLOCK}


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_wholly_cached_prompt_and_the_next_turn(
    caching: RunningMesh, step_by_step: RunningMesh, spare: int
) -> None:
    """R064: at the edge of a block, the same text and logprobs with the cache as without."""
    prompt = prompt_of(4 * BLOCK + spare, 2000 + 500 * spare)
    expected, _ = answer(step_by_step, prompt)
    assert answer(caching, prompt) == (expected, 0)
    assert answer(caching, prompt) == (expected, (len(prompt) - 1) // BLOCK * BLOCK)
    tokenized = caching.post("/tokenize", prompt=expected.text, add_special_tokens=False)
    turn = prompt + tokenized.json()["tokens"] + prompt_of(5, 5000)
    said, cached = answer(caching, turn)
    assert said == answer(step_by_step, turn)[0]
    # The KV of the last token said was never computed; what is said may be tokenized otherwise.
    assert len(prompt) // BLOCK * BLOCK <= cached <= (len(prompt) + TOKENS - 1) // BLOCK * BLOCK


def test_common_beginnings_change_no_answer(
    caching: RunningMesh, step_by_step: RunningMesh
) -> None:
    """R070, logprobs too: with 0, 1, 15, 16, 17 and 33 tokens; one by one, then all at once."""
    common = prompt_of(40, 6000)
    prompts = [
        common[:shared] + prompt_of(20, 7000 + 500 * number)
        for number, shared in enumerate((0, 1, 15, 16, 17, 33))
    ]
    expected = [answer(step_by_step, prompt)[0] for prompt in prompts]
    answer(caching, common)
    serial = [answer(caching, prompt) for prompt in prompts]
    assert serial == list(zip(expected, (0, 0, 0, 16, 16, 32), strict=True))
    with ThreadPoolExecutor(len(prompts)) as pool:
        crowd = list(pool.map(lambda prompt: answer(caching, prompt), prompts))
    assert [said for said, _ in crowd] == expected
    assert all(cached >= BLOCK for _, cached in crowd)


def test_a_salt_shares_with_itself_alone(caching: RunningMesh) -> None:
    """R067: never a hit across salts."""
    prompt = prompt_of(3 * BLOCK + 4, 10_000)
    salts: list[dict[str, str]] = [{}, {"cache_salt": "x"}, {"cache_salt": "y"}]
    first = [answer(caching, prompt, **salt) for salt in salts]
    second = [answer(caching, prompt, **salt) for salt in salts]
    assert [cached for _, cached in first] == [0, 0, 0]
    assert [cached for _, cached in second] == [3 * BLOCK] * 3
    assert all(said == first[0][0] for said, _ in first + second)


def test_after_a_stream_that_was_left_the_same_request_is_answered(caching: RunningMesh) -> None:
    """R059: again and again, while what was left still ends."""
    prompt = prompt_of(3 * BLOCK + 4, 11_000)
    expected, _ = answer(caching, prompt)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True}
    for _ in range(5):
        with caching.client.stream("POST", "/v1/completions", json=body) as leaving:
            next(leaving.iter_lines())
        assert answer(caching, prompt) == (expected, 3 * BLOCK)

"""Greedy text equals transformers' `generate`, whatever else happens in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.harness import RunningMesh, running_mesh
from tests.e2e.reference import NEW_TOKENS, Expected, Reference

ALONE = 6  # tokens
CHUNKED = 513  # the longest prompt where the others are computed in pieces, or again


def outcome(mesh: RunningMesh, prompt: list[int]) -> tuple[str, int, str]:
    answer = mesh.complete(prompt, max_tokens=NEW_TOKENS)
    choice = answer["choices"][0]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    return choice["text"], answer["usage"]["completion_tokens"], choice["finish_reason"]


def expected(case: Expected) -> tuple[str, int, str]:
    return case.text, case.tokens, case.finish_reason


def assert_crowd(mesh: RunningMesh, cases: list[Expected]) -> None:
    with ThreadPoolExecutor(32) as pool:
        outcomes = pool.map(lambda case: outcome(mesh, case.prompt), cases)
    for case, found in zip(cases, outcomes, strict=True):
        assert found == expected(case), len(case.prompt)


def test_alone(mesh: RunningMesh, reference: Reference) -> None:
    """R074: with the crowds below, the same text whatever else is in the batch.

    Longer prompts alone are compared by their logprobs, in `test_logprobs`.
    """
    for case in reference.mixed(257):
        answer = mesh.complete(case.prompt, max_tokens=ALONE, cache_salt="alone")
        assert answer["usage"]["completion_tokens"] == ALONE
        text = answer["choices"][0]["text"]
        assert text, len(case.prompt)
        assert case.text.startswith(text), len(case.prompt)


def test_32_at_once(mesh: RunningMesh, reference: Reference) -> None:
    """R074: in another order, and then another."""
    assert_crowd(mesh, reference.mixed())
    assert_crowd(mesh, reference.mixed()[::-1])


def test_small_token_budget(model_dir: Path, reference: Reference) -> None:
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "64", "--run-ahead", "2")
    with running_mesh(model_dir, *flags) as mesh:
        assert_crowd(mesh, reference.mixed(CHUNKED))
        mesh.wait_idle()


def test_step_by_step(step_by_step: RunningMesh, reference: Reference) -> None:
    assert_crowd(step_by_step, reference.mixed(129))


@pytest.fixture(scope="module")
def tight(model_dir: Path) -> Iterator[RunningMesh]:
    """With a cache that holds the longest prompt and little more."""
    blocks = (CHUNKED + NEW_TOKENS) // 16 + 1
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", str(blocks), "--run-ahead", "2")
    with running_mesh(model_dir, *flags) as mesh:
        yield mesh
        mesh.wait_idle()


def test_preempted_prompts(tight: RunningMesh, reference: Reference) -> None:
    assert_crowd(tight, reference.mixed(CHUNKED))
    assert_crowd(tight, reference.mixed(17))


def test_preempted_decodes(tight: RunningMesh, mesh: RunningMesh) -> None:
    """R047, R049: ten of four blocks, where eight find a place: some are put back, none is changed.

    And none again and again.
    """
    prompts = [f"{number} things to know about water mills:" for number in range(2, 12)]

    def ask(server: RunningMesh) -> list[str]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            texts = pool.map(lambda one: server.text(one, max_tokens=48, ignore_eos=True), prompts)
        return list(texts)

    before = tight.metric("headrace_num_preemptions_total")
    assert ask(tight) == ask(mesh)
    assert 0 < tight.metric("headrace_num_preemptions_total") - before < 3 * len(prompts)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_is_exact(mesh: RunningMesh, max_tokens: int) -> None:
    answer = mesh.complete("Count: one, two,", max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"

"""Greedy text equals transformers' `generate`, whatever else happens in the batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.harness import RunningMesh, running_mesh
from tests.e2e.reference import NEW_TOKENS, Expected, Reference


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
    """R074: with the crowds below, the same text whatever else is in the batch."""
    for case in reference.mixed:
        assert outcome(mesh, case.prompt) == expected(case), len(case.prompt)


def test_32_at_once(mesh: RunningMesh, reference: Reference) -> None:
    """R074: in another order, and then another."""
    assert_crowd(mesh, reference.mixed)
    assert_crowd(mesh, reference.mixed[::-1])


def test_small_token_budget(model_dir: Path, reference: Reference) -> None:
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "64", "--run-ahead", "2")
    with running_mesh(model_dir, *flags) as mesh:
        assert_crowd(mesh, reference.mixed)
        mesh.wait_idle()


def test_step_by_step(step_by_step: RunningMesh, reference: Reference) -> None:
    assert_crowd(step_by_step, [case for case in reference.mixed if len(case.prompt) < 130])


def test_preemption(model_dir: Path, reference: Reference) -> None:
    """A cache that holds the longest prompt and little more: others are computed again."""
    blocks = (1500 + NEW_TOKENS) // 16 + 1
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", str(blocks), "--run-ahead", "2")
    with running_mesh(model_dir, *flags) as mesh:
        assert_crowd(mesh, reference.mixed)
        assert_crowd(mesh, [case for case in reference.mixed if len(case.prompt) < 20])
        mesh.wait_idle()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_is_exact(mesh: RunningMesh, max_tokens: int) -> None:
    answer = mesh.complete("Count: one, two,", max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


def test_preempted_decodes(model_dir: Path) -> None:
    """Five sequences of four blocks in a cache of ten: some are put back, none is changed."""
    prompts = [f"{number} things to know about water mills:" for number in range(2, 7)]
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", "10", "--max-model-len", "100")
    with running_mesh(model_dir, *flags) as mesh:

        def ask(prompt: str) -> str:
            return mesh.text(prompt, max_tokens=48, ignore_eos=True)

        alone = [ask(prompt) for prompt in prompts]
        assert mesh.metric("headrace_num_preemptions_total") == 0
        with ThreadPoolExecutor(5) as pool:
            assert list(pool.map(ask, prompts)) == alone
        assert 0 < mesh.metric("headrace_num_preemptions_total") < 15
        mesh.wait_idle()

"""Seeds and temperatures: a request's tokens depend on nothing but the request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.harness import RunningMesh

SEEDED = {"temperature": 0.9, "seed": 123, "max_tokens": 20}
PROMPTS = ["The sky is", "One, two,", "Water boils at", "import os", "My name is"]


@pytest.fixture(scope="module")
def alone(session_mesh: RunningMesh) -> list[str]:
    """The greedy text of each of `PROMPTS`."""
    return [session_mesh.text(prompt, max_tokens=8) for prompt in PROMPTS]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12])
def test_tiny_temperatures_are_greedy(
    mesh: RunningMesh, alone: list[str], temperature: float
) -> None:
    """R014, beside greedy neighbours in one batch."""

    def ask(prompt: str) -> str:
        return mesh.text(prompt, max_tokens=8, temperature=temperature, seed=3)

    with ThreadPoolExecutor(10) as pool:
        neighbours = [pool.submit(mesh.text, prompt, max_tokens=8) for prompt in PROMPTS]
        assert list(pool.map(ask, PROMPTS)) == alone
        assert [neighbour.result() for neighbour in neighbours] == alone


def test_a_tiny_top_p_is_greedy(mesh: RunningMesh, alone: list[str]) -> None:
    answer = mesh.complete(PROMPTS, max_tokens=8, temperature=1, top_p=1e-4)
    assert [choice["text"] for choice in answer["choices"]] == alone


def test_a_seed_gives_one_text(mesh: RunningMesh, step_by_step: RunningMesh) -> None:
    """R035: alone, in a crowd, and from another server; unseeded neighbours differ."""
    texts = [mesh.text("Once", **SEEDED) for _ in range(3)]
    with ThreadPoolExecutor(16) as pool:
        crowd = [pool.submit(mesh.text, "Once", temperature=0.9, max_tokens=20) for _ in range(8)]
        texts += pool.map(lambda _: mesh.text("Once", **SEEDED), range(3))
        assert len({one.result() for one in crowd}) > 1
    texts.append(step_by_step.text("Once", **SEEDED))
    assert len(set(texts)) == 1


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_seeds_accepted(mesh: RunningMesh, seed: int) -> None:
    texts = {mesh.text("Once", temperature=1, seed=seed, max_tokens=8) for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize("seed", [-1, 2**63, -(2**63), 2**70])
def test_odd_seeds_never_fail_inside(mesh: RunningMesh, seed: int) -> None:
    response = mesh.post("/v1/completions", prompt="Once", seed=seed, max_tokens=2)
    assert response.status_code in (200, 400)


def test_many_wild_requests_end_well(mesh: RunningMesh) -> None:
    """R010: no sequence of ids breaks the decoder."""

    def ask(seed: int) -> str:
        answer = mesh.complete("a", temperature=2, max_tokens=40, seed=seed)
        reason: str = answer["choices"][0]["finish_reason"]
        return reason

    with ThreadPoolExecutor(48) as pool:
        assert set(pool.map(ask, range(48))) <= {"length", "stop"}

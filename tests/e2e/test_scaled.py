"""Several instances of each service, and a mesh at rest."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.e2e.harness import RunningMesh, running_mesh
from tests.e2e.reference import NEW_TOKENS, Reference


def test_two_of_each(model_dir: Path, reference: Reference) -> None:
    flags = ("--dtype", "float32", "--gateways", "2", "--tokenizers", "2", "--detokenizers", "2")
    cases = reference.mixed(33)
    with running_mesh(model_dir, *flags) as mesh:
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda case: fresh_text(mesh, case.prompt), cases * 2)
        assert list(answers) == [case.text for case in cases] * 2
        for service in ("gateway", "tokenizer", "detokenizer"):
            for index in range(2):
                assert mesh.child(f"{service} {index}").is_running()
        # R097: whichever gateway is asked, the sum comes.
        totals = []
        for _ in range(10):
            with mesh.another_client() as client:
                totals.append(mesh.metric("headrace_request_success_total", client=client))
        assert totals == [2 * len(cases)] * 10
        mesh.wait_idle()


def fresh_text(mesh: RunningMesh, prompt: list[int]) -> str:
    """Over a connection of its own, so that any gateway may answer."""
    with mesh.another_client() as client:
        body = {"model": "smol", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
        text: str = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        return text


def test_an_idle_mesh_uses_no_cpu(mesh: RunningMesh) -> None:
    mesh.wait_idle()
    processes = psutil.Process(mesh.process.pid).children()

    def seconds() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    before = seconds()
    time.sleep(5)
    used = [after - start for after, start in zip(seconds(), before, strict=True)]
    assert max(used) <= 0.05, used  # CPU time, in ticks of 10 ms: 1 % at most

"""One mesh for all tests that do not need flags of their own, and transformers to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RunningMesh, running_mesh
from tests.e2e.reference import Reference


@pytest.fixture(scope="session")
def session_mesh(model_dir: Path) -> Iterator[RunningMesh]:
    with running_mesh(model_dir, "--dtype", "float32") as mesh:
        yield mesh


@pytest.fixture
def mesh(session_mesh: RunningMesh) -> Iterator[RunningMesh]:
    """The shared mesh; after each test it must be idle again."""
    yield session_mesh
    session_mesh.wait_idle()


@pytest.fixture(scope="session")
def step_by_step(model_dir: Path) -> Iterator[RunningMesh]:
    """The same, but it plans each iteration when the one before is over, and caches no prefixes."""
    flags = ("--run-ahead", "0", "--max-lease", "0", "--no-enable-prefix-caching")
    with running_mesh(model_dir, "--dtype", "float32", *flags) as mesh:
        yield mesh
        mesh.wait_idle()


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)

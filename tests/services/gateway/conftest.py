"""A gateway that is ready, with the services around it in the test's hands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.services.gateway.scripted_mesh import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    ScriptedMesh,
    scripted_mesh,
    wait_ready,
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared directory as far as a gateway reads it."""
    path = tmp_path_factory.mktemp("tiny")
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
async def mesh() -> AsyncIterator[ScriptedMesh]:
    async with scripted_mesh() as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: ScriptedMesh, tiny_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in a whole mesh."""
    url = await mesh.start_gateway(tiny_model)
    await mesh.start_all()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await wait_ready(client)
        yield client

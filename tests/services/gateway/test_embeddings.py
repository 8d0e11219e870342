"""/v1/embeddings: forms, order, dimensions and usage."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.messages import Deltas, Finished, Generate
from shared.types import FinishReason, int32s
from tests.services.gateway.scripted_mesh import (
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    ScriptedMesh,
    background,
    wait_ready,
)

SIZE = 4


@pytest.fixture
async def client(mesh: ScriptedMesh, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "hidden_size": SIZE,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    url = await mesh.start_gateway(tmp_path)
    await mesh.start_all()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await wait_ready(client)
        yield client


def answer(mesh: ScriptedMesh, request: Generate, vector: list[float]) -> None:
    mesh.accept(request)
    raw = struct.pack(f"<{SIZE}f", *vector)
    end = Finished(request.request_id, FinishReason.LENGTH, 0, embedding=raw)
    mesh.detokenizer.tell(
        Deltas([], [], int32s(), int32s(), [end]),
        request.route.gateway,
    )


async def embed(
    mesh: ScriptedMesh, client: httpx.AsyncClient, vectors: list[list[float]], **body: Any
) -> Any:
    async with background(client.post("/v1/embeddings", json=body)) as asking:
        requests = [await mesh.tokenizer.hear(Generate) for _ in vectors]
        for request in requests:
            assert request.params.embed
            assert request.params.max_tokens == 0
        for request, vector in reversed(list(zip(requests, vectors, strict=True))):
            answer(mesh, request, vector)
        return (await asking).json()


async def test_each_input_has_its_vector(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    vectors = [[1.0, 0, 0, 0], [0, 0.5, 0.5, 0]]
    found = await embed(mesh, client, vectors, input=["a", "b"])
    assert [one["embedding"] for one in found["data"]] == vectors
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert (found["object"], found["model"]) == ("list", MODEL)


async def test_forms(mesh: ScriptedMesh, client: httpx.AsyncClient) -> None:
    vector = [0.5, -0.5, 0.5, 0.5]
    found = await embed(mesh, client, [vector], input=[1, 2], encoding_format="base64")
    raw = base64.b64decode(found["data"][0]["embedding"])
    assert list(struct.unpack("<4f", raw)) == vector
    found = await embed(mesh, client, [vector], input="a", dimensions=2)
    short = found["data"][0]["embedding"]
    assert short == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, body: Any, param: str) -> None:
    refused = await client.post("/v1/embeddings", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param

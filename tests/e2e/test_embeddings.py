"""Embeddings are the model's own last hidden states."""

from __future__ import annotations

import pytest
import torch
from openai import OpenAI

from tests.e2e.harness import MODEL, RunningMesh
from tests.e2e.reference import Reference

TEXTS = ["The cat sat on the mat.", "A feline rested upon a rug, or so they say." * 20, "x"]


@torch.inference_mode()
def expected(reference: Reference, text: str) -> list[float]:
    ids = torch.tensor([reference.tokenizer.encode(text).ids])
    state = reference.model.model(ids).last_hidden_state[0, -1]
    vector: list[float] = (state / state.norm()).tolist()
    return vector


def test_vectors_equal_transformers(mesh: RunningMesh, reference: Reference) -> None:
    wanted = [pytest.approx(expected(reference, text), abs=1e-4) for text in TEXTS]
    with OpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        for _ in range(2):  # the second time the cache has their beginnings
            answer = client.embeddings.create(model=MODEL, input=TEXTS)
            assert [one.embedding for one in answer.data] == wanted
        ids = [reference.tokenizer.encode(text).ids for text in TEXTS]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        of_ids = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
        assert [one.embedding for one in of_ids.data] == wanted
        short = client.embeddings.create(model=MODEL, input="x", dimensions=8).data[0].embedding
        assert sum(value * value for value in short) == pytest.approx(1, abs=1e-5)
        assert len(short) == 8
    mesh.wait_idle()

"""The official client understands the answers, and raises the fitting class for each refusal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from services.gateway import admission
from shared.messages import Failure, Generate
from shared.types import ServiceName
from tests.services.gateway.scripted_mesh import (
    CREDIT,
    MODEL,
    ScriptedMesh,
    background,
    until,
)

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def official(client: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{client.base_url}/v1", api_key="any", max_retries=0, timeout=20
    ) as official:
        yield official


async def test_answers(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    mesh.autopilot = True
    completion = await official.completions.create(
        model=MODEL, prompt="hi", seed=1, max_tokens=2, stop=None, user="me"
    )
    assert completion.choices[0].text == "seed1 word2"
    chat = await official.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=1, max_tokens=2, n=2
    )
    assert [choice.message.content for choice in chat.choices] == ["seed1 word2", "seed2 word2"]
    assert chat.usage is not None
    assert chat.usage.total_tokens == 7
    assert [model.id async for model in official.models.list()] == [MODEL]
    assert (await official.models.retrieve(MODEL)).id == MODEL


async def test_streams(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    mesh.autopilot = True
    stream = await official.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        seed=1,
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "seed1 word2 word3"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_an_error_in_a_stream_is_raised(mesh: ScriptedMesh, official: AsyncOpenAI) -> None:
    """R025"""
    async with background(_all_chunks(official)) as reading:
        request = await mesh.tokenizer.hear(Generate)
        mesh.accept(request)
        mesh.delta(request, "x")
        mesh.fail(request, Failure(500, "it broke"))
        with pytest.raises(openai.APIError, match="it broke"):
            await reading


async def _all_chunks(official: AsyncOpenAI) -> list[str]:
    stream = await official.completions.create(model=MODEL, prompt="hi", stream=True)
    return [chunk.choices[0].text async for chunk in stream]


async def test_refusals_have_their_classes(
    mesh: ScriptedMesh, official: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    completions = official.completions
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        await completions.create(model=MODEL, prompt="hi", temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        await official.chat.completions.create(
            model=MODEL, messages=MESSAGES, tool_choice="required"
        )
    with pytest.raises(openai.NotFoundError, match=MODEL) as missing:
        await completions.create(model="wrong", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="Unknown route"):
        await official.moderations.create(input="hi")
    size = CREDIT.max_num_seqs + CREDIT.max_queue
    async with background(completions.create(model=MODEL, prompt=["x"] * size)):
        await mesh.tokenizer.hear(Generate)
        with pytest.raises(openai.RateLimitError, match="full"):
            await completions.create(model=MODEL, prompt="hi")
    monkeypatch.setattr(admission, "OUTAGE_SECONDS", 0.0)
    await mesh.kill(mesh.scheduler)
    await until(lambda: not mesh.gateways[0].mesh.peers(ServiceName.SCHEDULER))
    with pytest.raises(openai.InternalServerError):
        await completions.create(model=MODEL, prompt="hi")


async def test_a_wrong_key(mesh: ScriptedMesh, tiny_model: Path) -> None:
    url = await mesh.start_gateway(tiny_model, api_key=["right"])
    for key, error in (("wrong", openai.AuthenticationError), ("right", None)):
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as official:
            if error is None:
                assert (await official.models.list()).data
            else:
                with pytest.raises(error, match="API key"):
                    await official.models.list()

"""The names of the model: served, listed, asked for and answered with."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.services.gateway.scripted_mesh import ScriptedMesh, events_of, wait_ready

NAMES = ["first", "org/second"]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
PATHS = [*BODIES, "/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens"]


@pytest.fixture
async def named(mesh: ScriptedMesh, tiny_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that serves under two names."""
    url = await mesh.start_gateway(tiny_model, served_model_name=NAMES)
    await mesh.start_all()
    mesh.autopilot = True
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await wait_ready(client)
        yield client


def names_in(answer: Any) -> set[str]:
    """All that is called `model` in an answer, wherever."""
    if isinstance(answer, list):
        return set().union(*map(names_in, answer))
    if not isinstance(answer, dict):
        return set()
    own = {answer["model"]} if "model" in answer else set()
    return own | names_in(list(answer.values()))


def events(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
async def test_answers_bear_the_name_that_was_asked_for(
    named: httpx.AsyncClient, path: str
) -> None:
    """R106: or the first, if none was."""
    for asked, told in ((NAMES[0], NAMES[0]), (NAMES[1], NAMES[1]), (None, NAMES[0])):
        body = BODIES[path] | ({} if asked is None else {"model": asked})
        assert names_in((await named.post(path, json=body)).json()) == {told}
        streamed = (await named.post(path, json=body | {"stream": True})).text
        assert names_in(events(streamed)) == {told}
        if path.endswith("completions"):
            assert events_of(streamed)[-1] == "[DONE]"
            assert all(event["model"] == told for event in events(streamed))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("wrong", "status"),
    [("third", 404), ("", 404), ("First", 404), (5, 400), ([NAMES[0]], 400), (True, 400)],
)
async def test_other_names_are_refused_everywhere(
    named: httpx.AsyncClient, path: str, wrong: Any, status: int
) -> None:
    """R106"""
    whole = BODIES | {
        "/v1/embeddings": {"input": "hi"},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1]},
        "/v1/messages/count_tokens": {"messages": MESSAGES},
    }
    for more in ({}, {"stream": True}) if path in BODIES else ({},):
        answer = await named.post(path, json=whole[path] | {"model": wrong} | more)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert "model" in error["message"]
        if status == 404:
            assert all(name in error["message"] for name in NAMES)
        if not path.startswith("/v1/messages"):
            assert error["param"] == "model"
            assert status == 400 or error["code"] == "model_not_found"


async def test_the_list_has_all_names(named: httpx.AsyncClient) -> None:
    """R106"""
    listed = (await named.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == NAMES
    for name in NAMES:
        assert (await named.get(f"/v1/models/{name}")).json()["id"] == name
    async with openai.AsyncOpenAI(base_url=f"{named.base_url}/v1", api_key="any") as official:
        with pytest.raises(openai.NotFoundError, match="org/second"):
            await official.models.retrieve("third")

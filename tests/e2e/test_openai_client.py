"""The official client: lists, completes, chats, streams, and gets the fitting exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.harness import MODEL, RunningMesh, running_mesh

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]},
]


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completion_and_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=6, temperature=0)
    stream = client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6


def test_chat_and_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=10, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=10,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def counts(usage: openai.types.CompletionUsage | None) -> tuple[int, int, int]:
    """Without what the cache held, which is more the second time."""
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "no name", "parameters": {}}}],
        )


def test_key_and_queue(model_dir: Path) -> None:
    """R115: with one slot and four places, five of twenty are taken."""
    flags = ("--max-num-seqs", "1", "--max-queue", "4", "--api-key", "sesame")
    with running_mesh(model_dir, "--device", "simulated", "--sim", "base=0.1", *flags) as mesh:
        wrong = openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        mesh.client.headers["Authorization"] = "Bearer sesame"
        with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="sesame", max_retries=0) as client:
            streams, full = [], 0
            for _ in range(20):
                try:
                    streams.append(
                        client.completions.create(
                            model=MODEL, prompt="x", max_tokens=200, stream=True
                        )
                    )
                except openai.RateLimitError as error:
                    assert int(error.response.headers["Retry-After"]) > 0
                    full += 1
            for stream in streams:
                stream.close()
        assert (len(streams), full) == (5, 15)
        mesh.wait_idle()

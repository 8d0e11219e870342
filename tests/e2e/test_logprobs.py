"""Log-probabilities are the model's own, of prompts and answers, whatever else goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import RunningMesh
from tests.e2e.reference import Reference
from tests.e2e.sse import stream, strict_json

TOLERANCE = 1e-3
NEW = 4
TOP = 3
LENGTHS = [1, 2, 16, 17, 33, 129, 700]  # around the block size of 16, and over two chunks of 512
EMOJI: dict[str, Any] = {"prompt": "🫠🫠🫠🫠🫠🫠", "temperature": 0, "max_tokens": 12}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hi."}],
    "max_tokens": 5,
    "temperature": 0,
}

# The right end of each must be likelier than the wrong one.
QUESTIONS = [
    ("The capital of France is", " Paris", " banana"),
    ("The opposite of hot is", " cold", " chair"),
    ("Two plus two equals", " four", " river"),
    ("The sky is", " blue", " wooden"),
    ("Cats and", " dogs", " equations"),
    ("He drank a glass of", " water", " stones"),
    ("The sun rises in the", " east", " soup"),
    ("A year has twelve", " months", " elephants"),
    ("Fish swim in the", " water", " desk"),
    ("Once upon a", " time", " keyboard"),
    ("She read a", " book", " cloud"),
    ("The doctor works in a", " hospital", " teaspoon"),
    ("Bees make", " honey", " bridges"),
    ("Monday, Tuesday,", " Wednesday", " violin"),
    ("One, two, three,", " four", " sadness"),
    ("Ladies and", " gentlemen", " triangles"),
    ("The president of the United", " States", " Forks"),
    ("Thank you very", " much", " seldom"),
    ("He opened the door with a", " key", " comet"),
    ("Bread and", " butter", " gravity"),
]


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    ids = reference.tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text()).ids
    return [ids[length : 2 * length] for length in LENGTHS]


def ask(mesh: RunningMesh, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"max_tokens": NEW, "logprobs": TOP, "return_token_ids": True, "ignore_eos": True}
    choice: dict[str, Any] = mesh.complete(prompt, **body, **options)["choices"][0]
    return choice


def assert_true(reference: Reference, choice: dict[str, Any], echo: bool) -> None:
    """Each value is that of a forward pass, and the alternatives are its likeliest."""
    prompt = choice["prompt_token_ids"]
    ids = prompt + choice["token_ids"]
    first = 0 if echo else len(prompt)
    told = choice["logprobs"]
    lengths = {name: len(values) for name, values in told.items()}
    assert set(lengths.values()) == {len(ids) - first}, lengths
    expected = reference.logits(ids[:-1]).log_softmax(-1)
    own = expected.gather(1, expected.new_tensor(ids[1:]).long()[:, None])[:, 0].tolist()
    likeliest = expected.topk(TOP).values.tolist()
    if echo:
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    for position in range(max(first, 1), len(ids)):
        place = position - first
        value, top = told["token_logprobs"][place], told["top_logprobs"][place]
        assert value == pytest.approx(own[position - 1], abs=TOLERANCE), position
        assert top[told["tokens"][place]] == value
        found = sorted(top.values(), reverse=True)[:TOP]
        assert found == pytest.approx(likeliest[position - 1], abs=TOLERANCE), position


def test_of_prompts_and_answers_alone(
    mesh: RunningMesh, reference: Reference, prompts: list[list[int]]
) -> None:
    """R029"""
    for prompt in prompts:
        choice = ask(mesh, prompt, echo=True)
        assert choice["prompt_token_ids"] == prompt
        assert_true(reference, choice, echo=True)


def test_of_answers_with_cached_prefixes(
    mesh: RunningMesh, reference: Reference, prompts: list[list[int]]
) -> None:
    for prompt in prompts:
        first, second = (ask(mesh, prompt, cache_salt="logprobs") for _ in range(2))
        assert second["text"] == first["text"]
        assert_true(reference, second, echo=False)
    answer = mesh.complete(prompts[-1], max_tokens=1, logprobs=0, cache_salt="logprobs")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 680
    # What the cache holds is computed again if it is to be told of.
    answer = mesh.complete(prompts[-1], max_tokens=1, prompt_logprobs=0, cache_salt="logprobs")
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(prompts[-1])


def test_of_a_crowd(mesh: RunningMesh, reference: Reference, prompts: list[list[int]]) -> None:
    """Beside each other, and beside some that want to hear of nothing."""

    def one(number: int) -> dict[str, Any]:
        prompt = prompts[number % len(prompts)]
        if number % 3 == 2:
            return mesh.complete(prompt, max_tokens=NEW)
        return ask(mesh, prompt, echo=number % 3 == 0)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(3 * len(prompts))))
    for number, choice in enumerate(answers):
        if number % 3 != 2:
            assert_true(reference, choice, echo=number % 3 == 0)


def test_of_a_prompt_only(mesh: RunningMesh) -> None:
    """R011: the log-likelihood call of evaluation tools."""
    body: dict[str, Any] = {
        "prompt": "Your answer: yes",
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
    }
    for streaming in (False, True):
        if streaming:
            streamed = stream(mesh, **body, stream_options={"include_usage": True})
            *chunks, last = streamed.events
            text, usage = streamed.text, last["usage"]
            told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            values = [value for one in told if one for value in one["token_logprobs"]]
        else:
            answer = mesh.post("/v1/completions", **body).json()
            choice, usage = answer["choices"][0], answer["usage"]
            text, values = choice["text"], choice["logprobs"]["token_logprobs"]
            assert choice["finish_reason"] == "length"
        assert text == "Your answer: yes"
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)
        assert values[0] is None and len(values) == 4
        assert all(value < 0 for value in values[1:])


def test_of_easy_questions(mesh: RunningMesh) -> None:
    """R029: a score that is no chance's."""

    def likelihood(question: str, end: str) -> float:
        body = {"max_tokens": 1, "echo": True, "logprobs": 1}
        told = mesh.complete(question + end, **body)["choices"][0]["logprobs"]
        start = told["text_offset"].index(len(question))
        return float(sum(told["token_logprobs"][start:-1]))

    with ThreadPoolExecutor(20) as pool:
        yes = pool.map(lambda one: likelihood(one[0], one[1]), QUESTIONS)
        no = pool.map(lambda one: likelihood(one[0], one[2]), QUESTIONS)
    assert sum(one > other for one, other in zip(yes, no, strict=True)) >= 18


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs(mesh: RunningMesh, reference: Reference, path: str) -> None:
    body: dict[str, Any] = {"prompt": "The sea is"} if path.endswith("/completions") else {}
    if "chat" in path:
        body = {"messages": CHAT["messages"]}
    options = {"prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 1}
    answer = mesh.post(path, **body, **options).json()
    place = answer if "chat" in path else answer["choices"][0]
    ids = place["prompt_token_ids"]
    expected = reference.logits(ids).log_softmax(-1)
    assert place["prompt_logprobs"][0] is None
    for position, told in enumerate(place["prompt_logprobs"][1:], 1):
        own = told[str(ids[position])]
        line = expected[position - 1]
        assert own["logprob"] == pytest.approx(float(line[ids[position]]), abs=TOLERANCE)
        assert own["rank"] == 1 + int((line > line[ids[position]]).sum())
        assert own["decoded_token"] == reference.tokenizer.decode(
            [ids[position]], skip_special_tokens=False
        )
        ranks = sorted(one["rank"] for one in told.values())
        assert ranks[:2] == [1, 2]


@pytest.mark.parametrize("top", [0, 5])
def test_the_form_in_chats(mesh: RunningMesh, top: int) -> None:
    """R026"""
    answer = mesh.post("/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=top).json()
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == CHAT["max_tokens"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == top
        if top:  # greedy
            assert entry["top_logprobs"][0]["token"] == entry["token"]
            values = [one["logprob"] for one in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
    events = stream(mesh, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=top).events
    told = [event["choices"][0]["logprobs"] for event in events]
    streamed = [entry["token"] for one in told if one for entry in one["content"]]
    assert streamed == [entry["token"] for entry in content]


def test_bytes_of_partial_characters(mesh: RunningMesh, reference: Reference) -> None:
    """R026: the bytes are those of the text, though tokens hold parts of characters only."""
    ids = reference.tokenizer.encode("🫠").ids
    assert len(ids) > 1
    forced = {"allowed_token_ids": ids, "temperature": 2, "seed": 3, "max_tokens": 12}
    answer = mesh.post("/v1/chat/completions", **CHAT | forced, logprobs=True).json()
    choice = answer["choices"][0]
    raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert raw.decode("utf-8", "replace") == choice["message"]["content"]
    whole = mesh.post("/v1/completions", **EMOJI, logprobs=2).json()["choices"][0]
    told = whole["logprobs"]
    assert any(token.startswith("bytes:\\x") for token in told["tokens"])
    joined = b"".join(piece_of(token) for token in told["tokens"])
    assert joined.decode("utf-8", "replace") == whole["text"]
    chunks = [event["choices"][0]["logprobs"] for event in stream(mesh, **EMOJI, logprobs=2).events]
    for name in ("tokens", "text_offset"):
        assert [value for chunk in chunks if chunk for value in chunk[name]] == told[name]


def piece_of(token: str) -> bytes:
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(one, 16) for one in token.removeprefix("bytes:").split("\\x")[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "temperature": 1},
        {"top_p": 0.01, "temperature": 1},
        {"logit_bias": {"28": -100}},
        {"allowed_token_ids": [28, 30]},
        {"bad_words": ["battery"]},
    ],
)
def test_values_are_finite(mesh: RunningMesh, options: dict[str, Any]) -> None:
    """R028: of the model's own distribution, whatever may be chosen from it."""
    body = {"prompt": "correct horse", "echo": True, "logprobs": 5, "max_tokens": 2}
    response = mesh.post("/v1/completions", **body, **options)
    assert response.status_code == 200
    told = strict_json(response.text)["choices"][0]["logprobs"]
    assert all(value > -1000 for value in told["token_logprobs"][1:])


def test_offsets_lead_to_the_tokens(mesh: RunningMesh) -> None:
    choice = mesh.complete("naïve café, 1, 2,", max_tokens=8, echo=True, logprobs=0)["choices"][0]
    told = choice["logprobs"]
    places = [*told["text_offset"], len(choice["text"])]
    pieces = [choice["text"][start:end] for start, end in pairwise(places)]
    whole = [
        (token, piece)
        for token, piece in zip(told["tokens"], pieces, strict=True)
        if not token.startswith("bytes:")
    ]
    assert all(token == piece for token, piece in whole)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"logprobs": 1_000_000}, "logprobs"),
        ("/v1/completions", {"logprobs": 21, "stream": True}, "logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 5, "stream": True}, "top_logprobs"),
    ],
)
def test_refusals(mesh: RunningMesh, path: str, fields: dict[str, Any], param: str) -> None:
    """R026, R038: with their own status, also of streams."""
    prompt = {"messages": CHAT["messages"]} if "chat" in path else {"prompt": [1] * 4000}
    response = mesh.post(path, **prompt, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.headers["content-type"] == "application/json"

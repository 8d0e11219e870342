"""Each field of the API, through the official client, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from shared.model import read_model_info
from tests.e2e.harness import MODEL, RunningMesh
from tests.e2e.reference import Adjust, Reference

PROMPT = "One, two, three,"
LIST = "A list:\n- a\n- a"  # it goes on like that, if it may
SAY_HI: list[Any] = [{"role": "user", "content": "Say hi."}]
COUNTING: list[Any] = [
    {"role": "user", "content": "Count"},
    {"role": "assistant", "content": "1, 2,"},
]
NEW = 8


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def prompt(reference: Reference) -> list[int]:
    return list(reference.tokenizer.encode(PROMPT).ids)


def complete(client: openai.OpenAI, **options: Any) -> str:
    """The text, which is the same in a stream."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": NEW}
    with ThreadPoolExecutor(1) as beside:
        whole = beside.submit(lambda: client.completions.create(**body | options))
        chunks = client.completions.create(**body | options, stream=True)
        streamed = "".join(chunk.choices[0].text for chunk in chunks)
    text: str = whole.result().choices[0].text
    assert streamed == text
    return text


def chat(client: openai.OpenAI, messages: list[Any], **options: Any) -> str:
    """The content, which is the same in a stream."""
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0}
    body |= {"max_tokens": NEW, **options}
    with ThreadPoolExecutor(1) as beside:
        whole = beside.submit(lambda: client.chat.completions.create(**body))
        chunks = client.chat.completions.create(**body, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    text: str = whole.result().choices[0].message.content
    assert streamed == text
    return text


def counted(output: list[int], size: int) -> Tensor:
    return torch.bincount(torch.tensor(output, dtype=torch.long), minlength=size)


def presence(logits: Tensor, output: list[int]) -> Tensor:
    return logits - 2.0 * (counted(output, len(logits)) > 0)


def frequency(logits: Tensor, output: list[int]) -> Tensor:
    return logits - 1.5 * counted(output, len(logits))


def biased(logits: Tensor, output: list[int]) -> Tensor:
    logits[28] -= 5  # a comma
    return logits


def allowed(logits: Tensor, output: list[int]) -> Tensor:
    only = torch.full_like(logits, -torch.inf)
    only[[28, 30, 198, 260]] = 0
    return logits + only


@pytest.mark.parametrize(
    ("text", "fields", "adjust"),
    [
        (LIST, {"presence_penalty": 2}, presence),
        (LIST, {"frequency_penalty": 1.5}, frequency),
        (PROMPT, {"logit_bias": {"28": -5}}, biased),
        (PROMPT, {"extra_body": {"allowed_token_ids": [28, 30, 198, 260]}}, allowed),
    ],
)
def test_what_changes_the_logits(
    client: openai.OpenAI,
    reference: Reference,
    text: str,
    fields: dict[str, Any],
    adjust: Adjust,
) -> None:
    prompt = reference.tokenizer.encode(text).ids
    expected = reference.tokenizer.decode(reference.greedy(prompt, NEW, adjust))
    assert complete(client, prompt=text, **fields) == expected
    assert complete(client, prompt=text) != expected


def test_repetition_penalty(client: openai.OpenAI, reference: Reference, prompt: list[int]) -> None:
    ids = torch.tensor([prompt])
    output = reference.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        repetition_penalty=1.3,
    )
    expected = reference.tokenizer.decode(output[0, len(prompt) :].tolist())
    assert complete(client, extra_body={"repetition_penalty": 1.3}) == expected
    assert complete(client) != expected


def test_bad_words(client: openai.OpenAI) -> None:
    plain = complete(client)
    assert " four" in plain
    assert " four" not in complete(client, extra_body={"bad_words": ["four"]})


def test_min_p(client: openai.OpenAI) -> None:
    """1 leaves the likeliest only."""
    assert complete(client, temperature=1, extra_body={"min_p": 1.0}) == complete(client)


def test_a_forced_token(client: openai.OpenAI, reference: Reference) -> None:
    token = reference.tokenizer.encode(" four").ids[0]
    bias = {str(token): 100}
    assert complete(client, logit_bias=bias, max_tokens=3) == " four four four"
    assert chat(client, SAY_HI, logit_bias=bias, max_tokens=2) == " four four"
    assert complete(client, logit_bias=None) == complete(client)


def test_every_end_token_ends_the_turn(client: openai.OpenAI, reference: Reference) -> None:
    """R031: those of the configurations and of the tokenizer; unless they are to be ignored."""
    ends = read_model_info(reference.directory).eos_token_ids
    assert ends
    for token in ends:
        body: dict[str, Any] = {"model": MODEL, "messages": SAY_HI, "max_tokens": 5}
        body["logit_bias"] = {str(token): 100}
        answer = client.chat.completions.create(**body)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == ""
        assert answer.to_dict()["usage"]["completion_tokens"] == 1
        answer = client.chat.completions.create(**body, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert answer.to_dict()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_forced_mark_as_stop_string(client: openai.OpenAI, skip: bool, include: bool) -> None:
    """R032"""
    switches = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    text = chat(
        client,
        SAY_HI,
        stop=["<|im_end|>"],
        logit_bias={"2": 100},
        extra_body={"ignore_eos": True, **switches},
    )
    assert text == ("<|im_end|>" if include and not skip else "")


def test_the_best_of_three(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": 3, "max_tokens": 6}
    three = client.completions.create(**body, n=3, logprobs=0)
    likelihoods = [
        sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
        for choice in three.choices
    ]
    ranked = sorted(range(3), key=lambda index: -likelihoods[index])
    for n in (1, 2):
        best = client.completions.create(**body, n=n, best_of=3)
        texts = [choice.text for choice in best.choices]
        assert texts == [three.choices[index].text for index in ranked[:n]]
        assert best.usage == three.usage


def test_ids_of_tokens(client: openai.OpenAI, reference: Reference, prompt: list[int]) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": NEW}
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    whole = client.completions.create(**body, logprobs=0, extra_body=extra).to_dict()
    choice = whole["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert reference.tokenizer.decode(choice["token_ids"]) == choice["text"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in choice["token_ids"]]
    chunks = [
        chunk.to_dict()["choices"][0]
        for chunk in client.completions.create(**body, stream=True, extra_body=extra)
    ]
    assert chunks[0]["prompt_token_ids"] == prompt
    ids = [one for chunk in chunks for one in chunk.get("token_ids", [])]
    assert ids == choice["token_ids"]


def test_usage_all_along(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=SAY_HI, max_tokens=4, stream=True, stream_options=options
    )
    counts = [chunk.model_dump()["usage"]["completion_tokens"] for chunk in stream]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 4)


def test_truncated_prompts(client: openai.OpenAI, prompt: list[int]) -> None:
    for length in (1, 3):
        extra = {"truncate_prompt_tokens": length}
        assert complete(client, extra_body=extra) == complete(client, prompt=prompt[-length:])
    answer = client.completions.create(
        model=MODEL, prompt=[5] * 9000, max_tokens=3, extra_body={"truncate_prompt_tokens": 20}
    )
    assert answer.model_dump()["usage"]["prompt_tokens"] == 20


def test_echo(client: openai.OpenAI, prompt: list[int]) -> None:
    expected = PROMPT + complete(client)
    for form in (PROMPT, prompt, [PROMPT], [prompt]):
        assert complete(client, prompt=form, echo=True) == expected


def test_a_continued_turn(client: openai.OpenAI, mesh: RunningMesh) -> None:
    """R110: twice, as the second time it is cached; no new turn is begun."""
    switches = {"continue_final_message": True, "add_generation_prompt": False}
    for _ in range(2):
        plain = chat(client, COUNTING, extra_body=switches)
        assert chat(client, COUNTING, extra_body={**switches, "echo": True}) == "1, 2," + plain
    ids = mesh.post("/tokenize", messages=COUNTING, **switches).json()["tokens"]
    assert mesh.post("/detokenize", tokens=ids).json()["prompt"].endswith("assistant\n1, 2,")
    with pytest.raises(openai.BadRequestError):
        chat(client, COUNTING, extra_body={**switches, "add_generation_prompt": True})
    assert chat(client, COUNTING)  # a new turn


def test_templates_of_requests(client: openai.OpenAI) -> None:
    """Refused by name unless the server is told to trust them; their variables are taken."""
    assert chat(client, SAY_HI, extra_body={"chat_template_kwargs": {"any": 1}})
    refused: list[dict[str, Any]] = [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"tools": []}},
    ]
    for fields in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, SAY_HI, extra_body=fields)
        assert caught.value.param in fields


def test_names_of_requests(client: openai.OpenAI) -> None:
    """R104: two may share one; what ends one of them is not for the other."""
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": True}
    headers = {"X-Request-Id": "same"}
    left = client.completions.create(
        **body, prompt="A", max_tokens=2000, extra_headers=headers, extra_body={"ignore_eos": True}
    )
    chunks = client.completions.create(**body, prompt=PROMPT, max_tokens=NEW, extra_headers=headers)
    assert next(left).id == "cmpl-same"
    left.close()
    read = list(chunks)
    assert {chunk.id for chunk in read} == {"cmpl-same"}
    assert "".join(chunk.choices[0].text for chunk in read) == complete(client)
    named = client.completions.create(
        model=MODEL, prompt="A", max_tokens=1, extra_body={"request_id": "mine"}
    )
    assert named.id == "cmpl-mine"


SENSIBLE: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "max_tokens": 1,
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 5,
    "stop": ["x"],
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "me",
}
OF_COMPLETIONS: dict[str, Any] = {"best_of": 2, "echo": True, "logprobs": 1}
OF_CHATS: dict[str, Any] = {
    "logprobs": True,
    "max_completion_tokens": 1,
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": True,
    "top_logprobs": 0,
    "verbosity": "medium",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_field_may_be_null_or_sensible(mesh: RunningMesh, path: str) -> None:
    """R116"""
    chats = "chat" in path
    base: dict[str, Any] = {"messages": SAY_HI} if chats else {"prompt": PROMPT}
    base["max_completion_tokens" if chats else "max_tokens"] = 1
    fields = SENSIBLE | (OF_CHATS if chats else OF_COMPLETIONS)
    for name, value in fields.items():
        for one in (value, None):
            if name not in base:
                assert mesh.post(path, **base, **{name: one}).status_code == 200, (name, one)
    assert mesh.post(path, **base, **dict.fromkeys(fields.keys() - base.keys())).status_code == 200

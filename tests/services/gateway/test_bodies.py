"""Bodies of requests: what is refused and how it is named, and what is made of the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from services.gateway.body import parse
from services.gateway.dialects.chat import ChatBody
from services.gateway.dialects.completion import CompletionBody
from services.gateway.dialects.tokenize import DetokenizeBody, TokenizeBody
from services.gateway.errors import ApiError, error_body
from services.gateway.fields import HARMLESS, UNSUPPORTED, unknown_fields
from services.gateway.generation_body import GenerationBody
from services.gateway.prompts import read_prompts
from services.gateway.request import Context, GenerationRequest, Tell
from services.gateway.tenants import tenant_of
from shared.messages import Prompt
from shared.sampling import Grammar, GrammarKind, LogitBias
from shared.types import int32s

VOCAB_SIZE = 1000
DRAWN_SEED = 77
CONTEXT = Context("m", VOCAB_SIZE, 2048, lambda: DRAWN_SEED)
CHAT = [{"role": "user", "content": "hi"}]


def read(kind: type[GenerationBody], body: Any) -> GenerationRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(kind, raw).to_request(CONTEXT)


def completion(**fields: Any) -> GenerationRequest:
    return read(CompletionBody, {"prompt": "hi", **fields})


def chat(**fields: Any) -> GenerationRequest:
    return read(ChatBody, {"messages": CHAT, **fields})


def refusal(kind: type[GenerationBody], body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(kind, body)
    assert caught.value.failure.status == 400
    return caught.value


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody])
@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"5", b"null", b"true", b'"x"', b"[]", b"\xef\xbb\xbf{}", b"\xff\xfe{}"),
        *(b"[" * 200_000, b'{"a":' * 200_000, b'{"prompt":"\\ud800"}', b'{"prompt":"a\x00"}'),
        b'{"max_tokens":' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(kind: type[GenerationBody], raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(kind, raw)
    assert caught.value.failure.status == 400
    assert len(caught.value.failure.message) < 500


@pytest.mark.parametrize(
    ("kind", "field"),
    [(CompletionBody, "prompt"), (ChatBody, "messages"), (DetokenizeBody, "tokens")],
)
def test_a_missing_field_is_named(kind: type[GenerationBody], field: str) -> None:
    for raw in (b"{}", json.dumps({field: None}).encode()):
        with pytest.raises(ApiError) as caught:
            parse(kind, raw)
        assert caught.value.failure.param == field


BAD_VALUES: dict[str, list[Any]] = {
    "max_tokens": [0, -1, "5", 1.5, 1e30, 5.0, True, [], 2**31],
    "temperature": [-0.1, 2.1, "1", True, float("nan"), float("inf")],
    "top_p": [0, -1, 1.1, "1", float("nan")],
    "top_k": [-2, 1.5, "5", True],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, -(2**63) - 1, "a", 1.5, True],
    "n": [0, -1, 129, "2", 1.0, True],
    "best_of": [0, 129, "1", True],
    "logprobs": [-1, 21, 1_000_000, "5", 1.5, True, False],
    "prompt_logprobs": [-1, 21, 1_000_000, "5", True],
    "echo": [1, 0, "yes"],
    "presence_penalty": [-2.1, 2.1, "1", True],
    "frequency_penalty": [-2.1, 2.1, "1"],
    "repetition_penalty": [0, -1, 2.1, "1"],
    "logit_bias": [{"5": 101}, {"5": -101}, {"5": "1"}, {"x": 1}, {"-1": 1}, {"1000": 1}, [5]],
    "allowed_token_ids": [[1000], [-1], ["a"], 5, [True]],
    "bad_words": [[""], [" "], [5], "x", ["x" * 1025], ["x"] * 129],
    "truncate_prompt_tokens": [0, -2, 2049, "5", 1.5, True],
    "return_token_ids": [1, "yes"],
    "return_tokens_as_token_ids": [1, "yes"],
    "request_id": ["", "a b", "\n", "\u00e9", "x" * 129, 5],
    "stop": ["", [""], ["a", ""], [5], 5, {}, ["x"] * 17, "x" * 1025],
    "stop_token_ids": [[99999999], [-1], ["a"], [[]], [True], 5, [10**30]],
    "min_tokens": [-1, "1", 17],
    "stream": ["yes", 1, 0],
    "stream_options": [{}, {"include_usage": True}, []],
    "model": [5, [], {}],
    "ignore_eos": ["true", 1],
    "user": [5, ["me"], {}],
    "priority": [1.5, "1", True, 2**31, -(2**31)],
    "cache_salt": ["", 5, ["x"], "x" * 1025],
}


@pytest.mark.parametrize("field", BAD_VALUES)
def test_bad_values_are_refused_by_name(field: str) -> None:
    for value in BAD_VALUES[field]:
        error = refusal(CompletionBody, {"prompt": "hi", field: value})
        assert error.failure.param == field, value
        assert field in error.failure.message


@pytest.mark.parametrize(
    "prompt",
    [
        *([1, 2, 99999999], [-1], [5279552648203111001], [1.5], [True], [[1], []], [[1], [True]]),
        *([], [[]], ["a", 1], [1, "a"], {}, 5, [None], [[1], "a"], [[[1]]], ["a"] * 4097),
    ],
)
def test_bad_prompts_are_refused(prompt: Any) -> None:
    assert refusal(CompletionBody, {"prompt": prompt}).failure.param == "prompt"


def test_defaults() -> None:
    request = completion()
    assert request.prompts == [Prompt(text="hi")]
    assert (request.n, request.stream, request.include_usage) == (1, False, False)
    params = request.params
    assert params.max_tokens == 16
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.seed, params.stop, list(params.stop_token_ids)) == (DRAWN_SEED, [], [])
    assert chat().params.max_tokens is None


def test_fields_arrive() -> None:
    params = completion(
        max_tokens=20,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        seed=5,
        stop="x",
        stop_token_ids=[3],
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    ).params
    assert (params.max_tokens, params.min_tokens, params.temperature) == (20, 2, 0.0)
    assert (params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 7, 0.25, 5)
    assert (params.stop, list(params.stop_token_ids), params.ignore_eos) == (["x"], [3], True)
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert completion(top_k=-1).params.top_k == 0


def test_tenants_are_told_apart_without_their_keys_or_names() -> None:
    pairs = [
        (key, user) for key in (None, "key0", "key1") for user in (None, "me", "you", "me" * 10_000)
    ]
    names = {pair: tenant_of(*pair) for pair in pairs}
    assert len(set(names.values())) == len(pairs)
    assert names[None, None] == "" and names["key1", None] == "key1"
    assert max(map(len, names.values())) < 30
    assert tenant_of("key0", "") == tenant_of("key0", None)
    raw = json.dumps({"prompt": "hi", "user": "me"}).encode()
    request = parse(CompletionBody, raw).to_request(replace(CONTEXT, key="key1"))
    assert request.tenant == names["key1", "me"]


def test_urgency_and_salt() -> None:
    assert (completion().priority, completion().cache_salt) == (0, "")
    assert (chat(priority=-7).priority, chat(cache_salt="s").cache_salt) == (-7, "s")


def test_prompt_forms() -> None:
    assert completion(prompt=["a", "b"]).prompts == [Prompt(text="a"), Prompt(text="b")]
    assert completion(prompt=[1, 2]).prompts == [Prompt(token_ids=int32s([1, 2]))]
    assert completion(prompt=[[1], [2]]).prompts == [
        Prompt(token_ids=int32s([1])),
        Prompt(token_ids=int32s([2])),
    ]
    assert completion(prompt="\x00").prompts == [Prompt(text="\x00")]
    assert not completion(add_special_tokens=False).prompts[0].add_special_tokens


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    )
)
def test_a_prompt_of_any_form_is_taken_or_refused(value: Any) -> None:
    try:
        prompts = read_prompts(value, VOCAB_SIZE, add_special_tokens=True)
    except ApiError as error:
        assert error.failure.param == "prompt"
    else:
        assert prompts


def test_chat_limits() -> None:
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=6).params.max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=6).params.max_tokens == 6
    for limits in ({"max_completion_tokens": 0}, {"max_completion_tokens": 0, "max_tokens": 5}):
        error = refusal(ChatBody, {"messages": CHAT, "echo": True, **limits})
        assert error.failure.param == "max_completion_tokens"


def test_logprobs() -> None:
    plain = completion()
    assert (plain.params.logprobs, plain.tell) == (None, Tell())
    asked = completion(logprobs=0, prompt_logprobs=3)
    assert (asked.params.logprobs, asked.params.prompt_logprobs) == (0, 3)
    assert asked.tell == Tell(logprobs=0, prompt_logprobs=3)
    assert not asked.params.echo
    chatted = chat(logprobs=True, top_logprobs=20)
    assert (chatted.params.logprobs, chatted.tell) == (20, Tell(logprobs=20))
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=False).params.logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21, "stream": True}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_fields_of_chats_that_do_not_go_together(fields: dict[str, Any], param: str) -> None:
    """R026, R038"""
    assert refusal(ChatBody, {"messages": CHAT, **fields}).failure.param == param


def test_echo() -> None:
    """R011: 0 tokens are for a prompt that is echoed."""
    echoed = completion(echo=True, logprobs=2, prompt_logprobs=5, max_tokens=0)
    assert (echoed.params.echo, echoed.params.max_tokens) == (True, 0)
    assert (echoed.params.logprobs, echoed.params.prompt_logprobs) == (2, 5)
    assert echoed.tell == Tell(logprobs=2, of_prompt=True, prompt_logprobs=5)
    assert completion(echo=True).params.prompt_logprobs is None
    continued = chat(echo=True, logprobs=True)
    assert not continued.params.echo  # the gateway knows that text
    assert continued.tell == Tell(logprobs=0)


def test_the_most_logprobs_are_a_setting() -> None:
    raw = json.dumps({"prompt": "hi", "logprobs": 5}).encode()
    for most, allowed in ((4, False), (5, True)):
        context = replace(CONTEXT, max_logprobs=most)
        try:
            parse(CompletionBody, raw).to_request(context)
        except ApiError as error:
            assert not allowed and "4" in error.failure.message
        else:
            assert allowed


def test_what_changes_the_logits() -> None:
    params = completion(
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "007": 0.5},
        allowed_token_ids=[9, 3, 9],
        bad_words=["x", " y z"],
    ).params
    assert (params.presence_penalty, params.frequency_penalty) == (-2.0, 2.0)
    assert params.repetition_penalty == 1.5
    assert params.logit_bias == [LogitBias(5, -100.0), LogitBias(7, 0.5)]
    assert list(params.allowed_token_ids) == [3, 9]
    assert params.bad_words == ["x", " y z"]
    assert completion(logit_bias={}, allowed_token_ids=[], bad_words=[]) == completion()


def test_forms_of_answers() -> None:
    """Read in full in the tests of their own."""
    assert completion(response_format={"type": "text"}) == completion()
    asked = chat(response_format={"type": "json_object"}).params.grammar
    assert asked is not None and asked.kind is GrammarKind.JSON_SCHEMA
    assert completion(guided_regex="[0-9]+").params.grammar == Grammar(GrammarKind.REGEX, "[0-9]+")
    for fields in ({"response_format": {"type": "xml"}}, {"response_format": 5}):
        assert (
            refusal(CompletionBody, {"prompt": "hi", **fields}).failure.param == "response_format"
        )
    both = {"prompt": "hi", "guided_regex": "a", "guided_choice": ["b"]}
    assert "guided_regex" in refusal(CompletionBody, both).failure.message


def test_best_of() -> None:
    request = completion(prompt=["a", "b"], n=2, best_of=5)
    assert (request.n, request.samples, request.size) == (2, 5, 10)
    assert (request.params.logprobs, request.tell.logprobs) == (0, None)  # to rank them
    assert completion(n=2, best_of=2, stream=True).params.logprobs is None
    assert completion(best_of=2, logprobs=3).params.logprobs == 3


def test_truncation() -> None:
    for prompt in ("a b c", [1, 2, 3], ["a", "b"]):
        request = completion(prompt=prompt, truncate_prompt_tokens=2)
        assert {one.truncate_to for one in request.prompts} == {2}
    assert chat(truncate_prompt_tokens=5).prompts[0].truncate_to == 5
    assert completion(truncate_prompt_tokens=-1, max_tokens=48).prompts[0].truncate_to == 2000
    assert chat(truncate_prompt_tokens=-1).prompts[0].truncate_to == 2047
    assert completion().prompts[0].truncate_to is None


def test_templates_of_requests() -> None:
    raw = json.dumps(
        {
            "messages": CHAT,
            "chat_template": "{{ mood }}",
            "chat_template_kwargs": {"mood": "glad", "deep": {"a": [None]}},
        }
    ).encode()
    trusting = replace(CONTEXT, trust_chat_template=True)
    made = parse(ChatBody, raw).to_request(trusting).prompts[0]
    assert made.chat_template == "{{ mood }}"
    assert made.chat is not None
    assert json.loads(made.chat) == {
        "mood": "glad",
        "deep": {"a": [None]},
        "messages": CHAT,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    with pytest.raises(ApiError) as caught:
        parse(TokenizeBody, raw).to_prompt(CONTEXT)
    assert caught.value.failure.param == "chat_template"


def test_chat_prompt() -> None:
    prompt = chat().prompts[0]
    assert prompt.chat is not None
    assert json.loads(prompt.chat) == {
        "messages": CHAT,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    assert not prompt.add_special_tokens
    error = refusal(ChatBody, {"messages": CHAT, "continue_final_message": True})
    assert error.failure.param == "continue_final_message"
    continued = chat(continue_final_message=True, add_generation_prompt=False).prompts[0]
    assert continued.chat is not None
    assert json.loads(continued.chat)["continue_final_message"]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 128))
def test_seeds(seed: int, n: int) -> None:
    request = completion(seed=seed, n=n)
    seeds = [request.params_of(sample).seed for sample in range(n)]
    assert len(set(seeds)) == n
    assert all(0 <= one < 2**63 for one in seeds)
    first = DRAWN_SEED if seed == -1 else seed % 2**63
    assert seeds == [(first + sample) % 2**63 for sample in range(n)]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - CompletionBody.model_fields.keys()))
def test_unsupported_fields_are_refused_unless_neutral(name: str) -> None:
    for neutral in (None, *UNSUPPORTED[name]):
        assert completion(**{name: neutral}) == completion()
    for asking in (5, "x", [1], {"a": 1}, True if False in UNSUPPORTED[name] else 0.5):
        error = refusal(CompletionBody, {"prompt": "hi", name: asking})
        assert (error.failure.param, error.failure.code) == (name, "unsupported_parameter")
        assert name in error.failure.message


def test_neutral_values_are_told_apart_by_type() -> None:
    """0 only compares equal to false."""
    body = {"prompt": "hi", "use_beam_search": 0}
    assert refusal(CompletionBody, body).failure.param == "use_beam_search"


@pytest.mark.parametrize(
    ("kind", "required", "params"),
    [
        (CompletionBody, {"prompt": "hi"}, CompletionCreateParamsBase),
        (ChatBody, {"messages": CHAT}, chat_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_official_client_is_known(
    kind: type[GenerationBody], required: dict[str, Any], params: type
) -> None:
    for name in {*get_type_hints(params), "stream"} - required.keys():
        known = {*kind.model_fields, *UNSUPPORTED, *HARMLESS}
        assert name in known, f"{name} is neither served, refused nor known to be harmless"
        assert read(kind, {**required, name: None}) == read(kind, required)


def test_unknown_fields_are_ignored() -> None:
    body = parse(
        CompletionBody, b'{"prompt":"hi","frobnicate":{"a":1},"user":"me","top_logprobs":0}'
    )
    assert unknown_fields(body.extra) == ["frobnicate"]


def test_refusals_are_short() -> None:
    part = {"type": "text", "text": 5}
    bodies: list[tuple[type[GenerationBody], dict[str, Any]]] = [
        (ChatBody, {"messages": [{"role": "user", "content": [part] * 5000}]}),
        (ChatBody, {"messages": [5] * 500_000}),
        (CompletionBody, {"prompt": ["a", 5] * 200_000}),
        (CompletionBody, {"prompt": "a", "stop": [5] * 500_000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * 500_000}),
        (CompletionBody, {"prompt": "a", "model": "x" * 1_000_000, "n": "y" * 1_000_000}),
    ]
    for kind, body in bodies:
        raw = json.dumps(body).encode()
        error = refusal(kind, raw)
        assert len(json.dumps(error_body(error.failure))) < 3000


def test_several_faults_are_told_together_but_not_all() -> None:
    message = refusal(CompletionBody, {"n": 0, "seed": "a", "top_p": 7, "stop": 5}).failure.message
    assert "seed:" in message
    assert "and 2 more" in message


def test_tokenize_bodies() -> None:
    def prompt(**body: Any) -> Prompt:
        return parse(TokenizeBody, json.dumps(body).encode()).to_prompt(CONTEXT)

    assert prompt(prompt="a") == Prompt(text="a", add_special_tokens=True)
    assert prompt(prompt="a", add_special_tokens=False) == Prompt("a", add_special_tokens=False)
    chatted = prompt(messages=CHAT, add_generation_prompt=False)
    assert chatted.chat is not None
    assert not chatted.add_special_tokens
    assert json.loads(chatted.chat)["add_generation_prompt"] is False
    for body in ({}, {"prompt": "a", "messages": CHAT}):
        with pytest.raises(ApiError):
            prompt(**body)

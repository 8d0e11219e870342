from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.tokenizer.encoder import Encoder
from services.tokenizer.processor import Answer, InputProcessor
from shared.messages import (
    Decode,
    Decoded,
    Encode,
    Encoded,
    Failure,
    Generate,
    Prompt,
    Refused,
    Route,
    Submit,
)
from shared.model import ModelInfo, read_model_info
from shared.sampling import Grammar, GrammarKind, SamplingParams
from shared.types import Int32s, RequestId, int32s
from tests.services.tokenizer.test_encoder import with_bos

ROUTE = Route("gateway.0", "detokenizer.0")
LIMIT = 100


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ModelInfo:
    return read_model_info(model_dir, LIMIT)


@pytest.fixture(scope="module")
def encoder(model_dir: Path) -> Encoder:
    return Encoder(model_dir)


@pytest.fixture(scope="module")
def processor(model: ModelInfo, encoder: Encoder) -> InputProcessor:
    return InputProcessor(model, encoder)


def params(max_tokens: int | None = 8, stop: list[str] | None = None) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=max_tokens, stop=stop or [])


def generate(
    text: str | None = None,
    *,
    ids: list[int] | None = None,
    chat: str | None = None,
    sampling: SamplingParams | None = None,
) -> Generate:
    column = None if ids is None else int32s(ids)
    prompt = Prompt(text, column, chat, add_special_tokens=chat is None)
    return Generate(RequestId("r"), prompt, sampling or params(), ROUTE)


def submitted(answer: Answer) -> Submit:
    assert isinstance(answer, Submit), answer
    return answer


def refusal(answer: Answer) -> Failure:
    assert isinstance(answer, Refused), answer
    assert answer.failure.status == 400
    return answer.failure


def chat_of(content: str) -> str:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"messages": messages, "add_generation_prompt": True})


def test_a_text_becomes_ids(processor: InputProcessor) -> None:
    question = generate("Hello world")
    [answer] = processor.process([question])
    assert answer == Submit(RequestId("r"), int32s([19556, 905]), question.params, ROUTE)


def test_what_concerns_the_scheduler_alone_goes_on(processor: InputProcessor) -> None:
    question = replace(generate("Hi"), tenant="key1", priority=-2, cache_salt="s")
    answer = submitted(processor.process([question])[0])
    assert (answer.tenant, answer.priority, answer.cache_salt) == ("key1", -2, "s")


def test_a_chat_goes_through_the_template(processor: InputProcessor, encoder: Encoder) -> None:
    [answer] = processor.process([generate(chat=chat_of("Hi"))])
    text = encoder.decode(submitted(answer).token_ids)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_of_the_request(processor: InputProcessor, encoder: Encoder) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "hi"}], "mood": "glad"})

    def answer(template: str) -> Answer:
        prompt = Prompt(chat=chat, chat_template=template, add_special_tokens=False)
        return processor.process([Generate(RequestId("r"), prompt, params(), ROUTE)])[0]

    made = answer("{{ mood }}: {{ messages[0].content }}")
    assert isinstance(made, Submit)
    assert encoder.decode(made.token_ids) == "glad: hi"
    for bad in ("{{ broken", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}"):
        refused = answer(bad)
        assert isinstance(refused, Refused)
        assert refused.failure.param == "chat_template"


def test_the_last_tokens_of_a_prompt(processor: InputProcessor) -> None:
    for prompt in (
        Prompt("one two three", truncate_to=2),
        Prompt(token_ids=int32s([5, 6, 7]), truncate_to=2),
    ):
        whole, cut = processor.process(
            [
                Encode(RequestId("r"), replace(prompt, truncate_to=None)),
                Generate(RequestId("r"), prompt, params(), ROUTE),
            ]
        )
        assert isinstance(whole, Encoded) and isinstance(cut, Submit)
        assert cut.token_ids == whole.token_ids[-2:]


def test_bad_words_have_the_ids_of_both_places(processor: InputProcessor, encoder: Encoder) -> None:
    sampling = replace(params(), bad_words=["sea", "the sea"])
    made = processor.process([generate("hi", sampling=sampling)])[0]
    assert isinstance(made, Submit)
    texts = [encoder.decode(ids) for ids in made.params.bad_word_ids]
    assert texts == ["sea", " sea", "the sea", " the sea"]


def test_ids_are_taken_as_they_are(processor: InputProcessor) -> None:
    [answer] = processor.process([generate(ids=[0, 49151])])
    assert submitted(answer).token_ids == int32s([0, 49151])


@pytest.mark.parametrize("bad", [-1, 49152, 99_999_999])
def test_an_id_outside_the_vocabulary_is_refused(processor: InputProcessor, bad: int) -> None:
    failure = refusal(processor.process([generate(ids=[1, bad, 2])])[0])
    assert failure.param == "prompt"
    assert str(bad) in failure.message
    stop = replace(params(), stop_token_ids=int32s([bad]))
    assert refusal(processor.process([generate("a", sampling=stop)])[0]).param == "stop_token_ids"


@pytest.mark.parametrize("prompt", [Prompt(text=""), Prompt(token_ids=int32s())])
def test_an_empty_prompt_is_refused(processor: InputProcessor, prompt: Prompt) -> None:
    [answer] = processor.process([Generate(RequestId("r"), prompt, params(), ROUTE)])
    assert refusal(answer).param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(90, 10, True), (90, 11, False), (99, None, True), (100, None, False), (300, 1, False)],
)
def test_prompt_and_completion_fit_the_context(
    processor: InputProcessor, prompt: int, max_tokens: int | None, fits: bool
) -> None:
    [answer] = processor.process([generate(ids=[5] * prompt, sampling=params(max_tokens))])
    if fits:
        assert submitted(answer).params.max_tokens == max_tokens
    else:
        failure = refusal(answer)
        assert failure.code == "context_length_exceeded"
        assert f"{LIMIT} tokens" in failure.message and f" {prompt} " in failure.message
        assert max_tokens is None or f"{max_tokens} for the completion" in failure.message


def test_a_special_token_as_stop_string_is_found_by_its_id(processor: InputProcessor) -> None:
    sampling = replace(params(stop=["<|im_end|>", "x"]), stop_token_ids=int32s([7]))
    answer = submitted(processor.process([generate("a", sampling=sampling)])[0])
    assert answer.params.stop_token_ids == int32s([7, 2])
    assert answer.params.stop == ["<|im_end|>", "x"]
    known = replace(params(stop=["<|im_end|>"]), stop_token_ids=int32s([2]))
    assert submitted(processor.process([generate("a", sampling=known)])[0]).params == known


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ broken", "broken"),
        ("{{ raise_exception('system only') }}", "system only"),
        ("{% for i in range(10**9) %}{% endfor %}", "ange"),
    ],
)
def test_without_a_usable_template_only_chats_are_refused(
    model: ModelInfo, encoder: Encoder, template: str | None, reason: str
) -> None:
    """R107"""
    processor = InputProcessor(replace(model, chat_template=template), encoder)
    chat, text = processor.process([generate(chat=chat_of("Hi")), generate("Hi")])
    assert reason in refusal(chat).message
    assert refusal(chat).param == "messages"
    assert submitted(text).token_ids


def test_a_start_token_of_the_template_is_the_only_one(model: ModelInfo, tmp_path: Path) -> None:
    """R109: whoever asks for ids, or for text."""
    encoder = Encoder(with_bos(tmp_path))
    template = "{{ bos_token }} {{ messages[0].content }}"
    starting = replace(model, chat_template=template, bos_token="<s>", vocab_size=3)
    chat = Prompt(chat=chat_of("a b"), add_special_tokens=False)
    sampled, encoded = InputProcessor(starting, encoder).process(
        [Generate(RequestId("r"), chat, params(), ROUTE), Encode(RequestId("r"), chat)]
    )
    assert isinstance(encoded, Encoded)
    assert submitted(sampled).token_ids == encoded.token_ids == int32s([0, 1, 2])


@pytest.mark.parametrize(
    ("question", "param"),
    [
        (generate("a \ud800 b"), "prompt"),
        (generate(chat='{"messages": [{"role": "user", "content": "\\udfff"}]}'), "messages"),
    ],
    ids=["text", "chat"],
)
def test_a_lone_surrogate_is_refused(
    processor: InputProcessor, question: Generate, param: str
) -> None:
    assert refusal(processor.process([question])[0]).param == param


def test_strange_text_is_still_text(processor: InputProcessor, encoder: Encoder) -> None:
    text = "\0\x1b[0m\ufffe\U0010ffff\u202e\r\n"
    assert encoder.decode(submitted(processor.process([generate(text)])[0]).token_ids) == text


def test_a_very_long_text_is_refused_with_its_true_length(
    processor: InputProcessor, encoder: Encoder
) -> None:
    text = "all work and no play " * 25_000
    [ids] = encoder.encode([text], add_special_tokens=True)
    assert f" {len(ids)} in the prompt" in refusal(processor.process([generate(text)])[0]).message


def test_answers_keep_the_order_and_one_bad_question_is_alone(processor: InputProcessor) -> None:
    def ids_of(answer: Answer) -> Int32s:
        assert isinstance(answer, Encoded)
        return answer.token_ids

    prompts = [Prompt(text="a"), Prompt(text="\ud800"), Prompt(token_ids=int32s([9])), Prompt("b")]
    questions = [Encode(RequestId(str(place)), prompt) for place, prompt in enumerate(prompts)]
    answers = processor.process(questions)
    assert [answer.request_id for answer in answers] == list("0123")
    assert [ids_of(answers[place]) for place in (0, 2, 3)] == [
        int32s([81]),
        int32s([9]),
        int32s([82]),
    ]
    refusal(answers[1])


def test_encode_and_decode(processor: InputProcessor) -> None:
    [encoded] = processor.process([Encode(RequestId("r"), Prompt(text="Hello world"))])
    assert encoded == Encoded(RequestId("r"), int32s([19556, 905]), LIMIT)
    decode = [Decode(RequestId("r"), int32s(ids)) for ids in ([19556, 905, 2], [], [49152])]
    whole, empty, bad = processor.process(decode)
    assert whole == Decoded(RequestId("r"), "Hello world<|im_end|>")
    assert empty == Decoded(RequestId("r"), "")
    assert refusal(bad).param == "tokens"
    empty_text = Encode(RequestId("r"), Prompt(text=""))
    assert processor.process([empty_text]) == [Encoded(RequestId("r"), int32s(), LIMIT)]


@pytest.mark.parametrize(("length", "kept"), [(1, 1), (60, 60), (100, 100)])
def test_of_a_long_prompt_the_end_can_be_kept(
    processor: InputProcessor, length: int, kept: int
) -> None:
    ids = list(range(300))
    prompt = Prompt(token_ids=int32s(ids), truncate_to=length)
    question = Generate(RequestId("r"), prompt, params(0), ROUTE)
    answer, encoded = processor.process([question, Encode(RequestId("r"), prompt)])
    assert submitted(answer).token_ids == int32s(ids[-kept:])
    assert encoded == Encoded(RequestId("r"), int32s(ids[-kept:]), LIMIT)


@pytest.mark.parametrize("length", [0, -1, LIMIT + 1])
def test_no_more_is_kept_than_the_context_holds(processor: InputProcessor, length: int) -> None:
    prompt = Prompt(text="Hello", truncate_to=length)
    [answer] = processor.process([Generate(RequestId("r"), prompt, params(1), ROUTE)])
    assert refusal(answer).param == "truncate_prompt_tokens"


def test_bad_words_are_found_with_and_without_a_space(
    processor: InputProcessor, encoder: Encoder
) -> None:
    words = ["water", " river bank", "1"]
    sampling = replace(params(), bad_words=words)
    found = submitted(processor.process([generate("a", sampling=sampling)])[0]).params.bad_word_ids
    texts = [encoder.decode(ids) for ids in found]
    assert texts[:4] == ["water", " water", "river bank", " river bank"]
    # A space and a digit are two tokens: whoever avoids the digit avoids both.
    assert texts[4:] == ["1"]


def test_a_bad_word_has_text(processor: InputProcessor) -> None:
    for word in (" ", "\ud800"):
        question = generate("a", sampling=replace(params(), bad_words=[word]))
        assert refusal(processor.process([question])[0]).param == "bad_words"


def test_a_grammar_alone_says_when_an_answer_ends(processor: InputProcessor) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    sampling = replace(params(), grammar=grammar, ignore_eos=True, min_tokens=5)
    answer = submitted(processor.process([generate("a", sampling=sampling)])[0])
    assert answer.params == replace(params(), grammar=grammar)

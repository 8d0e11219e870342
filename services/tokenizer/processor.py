"""Checks what the gateway asked for, and turns it into what the scheduler takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from services.tokenizer.encoder import Encoder
from shared.chat_template import ChatError, ChatTemplate
from shared.messages import (
    Decode,
    Decoded,
    Encode,
    Encoded,
    Failure,
    Generate,
    Prompt,
    Refused,
    Submit,
)
from shared.model import ModelInfo
from shared.sampling import SamplingParams
from shared.types import Int32s, int32s

Question = Generate | Encode | Decode
Answer = Submit | Encoded | Decoded | Refused

KEPT_TEMPLATES = 16  # of requests
NO_TEMPLATE = "This model has no chat template; use /v1/completions."


class Refusal(Exception):
    """A request that cannot be served as it is."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(400, message, param, code)


@dataclass(frozen=True, slots=True)
class Text:
    """What is still to be encoded."""

    text: str
    add_special_tokens: bool


class InputProcessor:
    """The whole way from a prompt to checked token ids; several threads may use it at once."""

    def __init__(self, model: ModelInfo, encoder: Encoder) -> None:
        self._model = model
        self._encoder = encoder
        self._special_tokens = encoder.special_tokens
        specials = {"bos_token": model.bos_token, "eos_token": model.eos_token}
        self._compiled = lru_cache(KEPT_TEMPLATES)(partial(ChatTemplate, special_tokens=specials))
        self._template: ChatTemplate | None = None
        self.template_problem: str | None = NO_TEMPLATE  # why there are no chats
        if model.chat_template is not None:
            try:
                self._template = ChatTemplate(model.chat_template, specials)
                self.template_problem = None
            except ChatError as error:
                self.template_problem = str(error)

    def process(self, questions: Sequence[Question]) -> list[Answer]:
        """One answer for each question, in order; whatever a client sent, nothing is raised."""
        inputs = [self._input(question) for question in questions]
        columns = self._encode_texts(inputs)
        return [self._answer(*pair) for pair in zip(questions, columns, strict=True)]

    def _input(self, question: Question) -> Text | Int32s | Refusal:
        if isinstance(question, Decode):
            return question.token_ids
        prompt = question.prompt
        if prompt.token_ids is not None:
            return prompt.token_ids
        try:
            text = prompt.text if prompt.text is not None else self._chat_text(prompt)
            return Text(_valid(text, _param(question)), prompt.add_special_tokens)
        except Refusal as refusal:
            return refusal

    def _chat_text(self, prompt: Prompt) -> str:
        source = prompt.chat_template
        try:
            template = self._template if source is None else self._compiled(source)
            if template is None:
                raise Refusal(self.template_problem or NO_TEMPLATE, "messages")
            return template.render(prompt.chat or "")
        except ChatError as error:
            param = "messages" if source is None else "chat_template"
            raise Refusal(str(error), param) from error

    def _encode_texts(self, inputs: Iterable[Text | Int32s | Refusal]) -> list[Int32s | Refusal]:
        """Texts become ids, all of a kind in one call."""
        columns: list[Int32s | Refusal] = []
        texts: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
        for place, one in enumerate(inputs):
            if isinstance(one, Text):
                texts[one.add_special_tokens].append((place, one.text))
            columns.append(int32s() if isinstance(one, Text) else one)
        for flag, placed in texts.items():
            ids = self._encode([text for _, text in placed], flag)
            for (place, _), column in zip(placed, ids, strict=True):
                columns[place] = column
        return columns

    def _encode(self, texts: Sequence[str], flag: bool) -> Sequence[Int32s | Refusal]:
        try:
            return self._encoder.encode(texts, add_special_tokens=flag)
        except ValueError as error:
            if len(texts) == 1:
                return [Refusal(f"The prompt cannot be tokenized: {error}", "prompt")]
            return [self._encode([text], flag)[0] for text in texts]  # only one is at fault

    def _answer(self, question: Question, ids: Int32s | Refusal) -> Answer:
        try:
            if isinstance(ids, Refusal):
                raise ids
            self._check_ids(ids, _param(question))
            if not isinstance(question, Decode):
                ids = self._truncated(ids, question.prompt.truncate_to)
            match question:
                case Decode():
                    return Decoded(question.request_id, self._encoder.decode(ids))
                case Encode():
                    return Encoded(question.request_id, ids, self._model.max_model_len)
                case Generate():
                    return self._submit(question, ids)
        except Refusal as refusal:
            return Refused(question.request_id, refusal.failure)

    def _submit(self, question: Generate, ids: Int32s) -> Submit:
        params = question.params
        if not ids:
            raise Refusal("The prompt is empty: at least one token is needed.", _param(question))
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_length(len(ids), params.max_tokens, _param(question))
        return Submit(
            question.request_id,
            ids,
            self._settled(params),
            question.route,
            tenant=question.tenant,
            priority=question.priority,
            cache_salt=question.cache_salt,
        )

    def _check_ids(self, ids: Int32s, param: str) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._model.vocab_size):
            bad = next(one for one in ids if not 0 <= one < self._model.vocab_size)
            limit = self._model.vocab_size - 1
            raise Refusal(f"{param}: token id {bad} is not from 0 to {limit}.", param)

    def _check_length(self, prompt: int, max_tokens: int | None, param: str) -> None:
        limit = self._model.max_model_len
        if prompt + (1 if max_tokens is None else max_tokens) <= limit:
            return
        message = f"This model's maximum context length is {limit} tokens. "
        if max_tokens is None:
            message += f"The prompt has {prompt} tokens, which leaves no room for an answer."
        else:
            message += (
                f"You requested {prompt + max_tokens} tokens: "
                f"{prompt} in the prompt, {max_tokens} for the completion."
            )
        raise Refusal(message, param, "context_length_exceeded")

    def _truncated(self, ids: Int32s, length: int | None) -> Int32s:
        if length is None:
            return ids
        limit, param = self._model.max_model_len, "truncate_prompt_tokens"
        if not 1 <= length <= limit:
            raise Refusal(f"{param}: must be from 1 to {limit}, the context length.", param)
        return ids[-length:]

    def _settled(self, params: SamplingParams) -> SamplingParams:
        """With what follows from the parameters and the model together."""
        # A special token is no text, so as a stop string it can only be found by its id.
        ids = [self._special_tokens[stop] for stop in params.stop if stop in self._special_tokens]
        new = [one for one in ids if one not in params.stop_token_ids]
        if new:
            params = replace(params, stop_token_ids=int32s([*params.stop_token_ids, *new]))
        if params.bad_words:
            params = replace(params, bad_word_ids=self._bad_word_ids(params.bad_words))
        if params.grammar is not None:  # it alone says when an answer may end, and when it must
            params = replace(params, ignore_eos=False, min_tokens=0)
        return params

    def _bad_word_ids(self, words: Sequence[str]) -> list[Int32s]:
        """The ids of each word at the beginning of a text, and of it after a space."""
        plain = [_valid(word.lstrip(), "bad_words") for word in words]
        if not all(plain):
            raise Refusal("bad_words: a word has no text.", "bad_words")
        texts = [text for word in plain for text in (word, f" {word}")]
        try:
            columns = self._encoder.encode(texts, add_special_tokens=False)
        except ValueError as error:
            raise Refusal(f"bad_words cannot be tokenized: {error}", "bad_words") from error
        pairs = zip(columns[::2], columns[1::2], strict=True)
        found = [column for first, spaced in pairs for column in _apart(first, spaced)]
        for ids in found:
            self._check_ids(ids, "bad_words")
        return found


def _apart(first: Int32s, spaced: Int32s) -> list[Int32s]:
    """Only one of them if the other ends with it, and so can never come without it."""
    return [first] if spaced[-len(first) :] == first else [first, spaced]


def _param(question: Question) -> str:
    """The field of the HTTP body that holds the prompt."""
    if isinstance(question, Decode):
        return "tokens"
    return "messages" if question.prompt.chat is not None else "prompt"


def _valid(text: str, param: str) -> str:
    """Half of a surrogate pair is no character, and nothing can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refusal(
            f"{param}: the text has a lone surrogate, which is no character.", param
        ) from None
    return text

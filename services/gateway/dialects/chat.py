"""/v1/chat/completions: messages, and the assistant's next one."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from services.gateway.body import RequestBody
from services.gateway.chat import read_messages
from services.gateway.collector import Choice
from services.gateway.errors import invalid
from services.gateway.generation_body import Alternatives, GenerationBody, TokenLimit
from services.gateway.logprobs import as_text, chat_logprobs
from services.gateway.request import Context, GenerationRequest
from services.gateway.shape import ChoiceShape, Shape, quote
from services.gateway.telling import Told
from shared.messages import Prompt

Template = Annotated[str, StringConstraints(min_length=1)]
# What a template is given by the server: not for `chat_template_kwargs`.
RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "bos_token", "eos_token"),
    }
)


class ChatOptions(RequestBody):
    """How a chat becomes a prompt, for generation and tokenization alike."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Template | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def chat_prompt(
        self,
        messages: list[dict[str, str]],
        context: Context,
        *,
        add_special_tokens: bool,
        truncate_to: int | None = None,
    ) -> Prompt:
        """Raises ApiError for options that do not go together, or are not allowed here."""
        self._check_options(trusted=context.trust_chat_template)
        chat = {
            **self.chat_template_kwargs,
            "messages": messages,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        return Prompt(
            chat=json.dumps(chat, ensure_ascii=False),
            add_special_tokens=add_special_tokens,
            truncate_to=truncate_to,
            chat_template=self.chat_template,
        )

    def _check_options(self, *, trusted: bool) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message needs add_generation_prompt false."
            raise invalid(message, "continue_final_message")
        if self.chat_template is not None and not trusted:
            message = "chat_template: this server does not render templates of requests."
            raise invalid(message, "chat_template", "unsupported_parameter")
        for name in sorted(RESERVED & self.chat_template_kwargs.keys()):
            message = f"chat_template_kwargs: {name!r} is not for a request to set there."
            raise invalid(message, "chat_template_kwargs")


class ChatBody(GenerationBody, ChatOptions):
    alternatives_field = "top_logprobs"

    messages: list[Any]  # checked in chat.py
    add_special_tokens: bool = False  # templates write the special tokens themselves
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: Alternatives = 0

    @property
    def token_limit(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def limit_field(self) -> str:
        older = self.max_completion_tokens is None
        return "max_tokens" if older else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs true.", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def prompts(self, context: Context) -> list[Prompt]:
        prompt = self.chat_prompt(
            read_messages(self.messages),
            context,
            add_special_tokens=self.add_special_tokens,
            truncate_to=self.truncate_to(context.max_model_len),
        )
        return [prompt]

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        return ChatShape(request, self._echoed if self.echo else "")

    @property
    def _echoed(self) -> str:
        """The text of the final message, if it is the assistant's."""
        final = read_messages(self.messages[-1:])[0]
        return final["content"] if final["role"] == "assistant" else ""


class ChatShape(ChoiceShape):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: GenerationRequest, echoed: str = "") -> None:
        """`echoed` comes before the answer's text."""
        super().__init__(request, chat_logprobs, as_text)
        self._echoed = echoed

    def opening(self, choices: list[Choice]) -> bytes:
        deltas = ['{"role":"assistant","content":""}']
        if self._echoed:
            deltas.append(f'{{"content":{quote(self._echoed)}}}')
        end = self._end_of_chunk(choices)
        events = [
            f'{self._start}{{"index":{index},"delta":{delta},"logprobs":null,'
            f'"finish_reason":null,"stop_reason":null}}{end}'
            for index in range(len(choices))
            for delta in deltas
        ]
        return "".join(events).encode()

    def _content(self, text: str) -> dict[str, Any]:
        content = self._echoed + text
        return {"message": {"role": "assistant", "content": content, "refusal": None}}

    def _chunk_content(self, text: str) -> str:
        return f'"delta":{{"content":{text}}}' if text != '""' else '"delta":{}'

    def _place_told(self, told: Told) -> tuple[dict[str, Any], dict[str, Any]]:
        return told.in_choice, told.of_prompt

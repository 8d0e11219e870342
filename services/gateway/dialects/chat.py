"""/v1/chat/completions: messages, and the assistant's next one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from services.gateway.chat import Message, read_messages
from services.gateway.dialects.chat_shape import ChatShape
from services.gateway.errors import invalid
from services.gateway.generation_body import Alternatives, GenerationBody, TokenLimit
from services.gateway.grammar_fields import FIELDS
from services.gateway.parsing.answers import AnswerFormat
from services.gateway.parsing.thinking import Thinking
from services.gateway.request import Context, GenerationRequest
from services.gateway.shape import Shape
from services.gateway.tool_use import ToolChoice
from services.gateway.tools import ToolFields
from shared.messages import Prompt
from shared.sampling import Grammar

Template = Annotated[str, StringConstraints(min_length=1)]
# What a template is given by the server: not for `chat_template_kwargs`.
RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "bos_token", "eos_token"),
    }
)


class ChatOptions(ToolFields):
    """How a chat becomes a prompt, for generation and tokenization alike."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Template | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def chat_prompt(
        self,
        messages: list[Message],
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
        if tools := self.told_tools():
            chat["tools"] = tools
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
    include_reasoning: bool = True

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

    def to_request(self, context: Context) -> GenerationRequest:
        request = super().to_request(context)
        format = self._format(context, request.params.grammar)
        params = format.apply(request.params)
        return replace(request, params=params, new_parser=format.new_parser)

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        use = self.tool_use()
        return ChatShape(
            request,
            echoed=self._final_text if self.echo else "",
            show_reasoning=self.include_reasoning,
            # OpenAI's answer to a call that was asked for by name.
            called="stop" if use and use.choice is ToolChoice.NAMED else "tool_calls",
        )

    def _format(self, context: Context, grammar: Grammar | None) -> AnswerFormat:
        use, formats = self.tool_use(), context.formats
        if use is not None and formats.tools is None:
            raise invalid(
                "tools: this server does not serve them.", "tools", "unsupported_parameter"
            )
        try:
            return formats.of_answer(use, self._thinking(context), grammar)
        except ValueError as error:
            name = next(name for name in sorted(FIELDS) if getattr(self, name))
            raise invalid(f"{name}: {error}.", name) from None

    def _thinking(self, context: Context) -> Thinking:
        thoughts = context.formats.thoughts
        if thoughts is None or self.chat_template is not None:
            return Thinking.OVER if thoughts is None else Thinking.POSSIBLE
        if self.continue_final_message:
            return thoughts.in_text(self._final_text)
        if not self.add_generation_prompt:
            return Thinking.POSSIBLE
        return thoughts.at_start(self.chat_template_kwargs)

    @property
    def _final_text(self) -> str:
        """The text of the final message, if it is the assistant's."""
        final = read_messages(self.messages[-1:])[0]
        text: str | None = final["content"] if final["role"] == "assistant" else ""
        return text or ""

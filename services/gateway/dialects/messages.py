"""/v1/messages: Anthropic's Messages API, and the counting of what it would be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, StringConstraints

from services.gateway.body import RequestBody, Tokens
from services.gateway.chat_terms import thinking_variables, with_thoughts_counted
from services.gateway.dialect import DialectBody
from services.gateway.dialects.chat import ChatBody
from services.gateway.dialects.messages_input import read_messages
from services.gateway.dialects.messages_shape import MessagesShape
from services.gateway.errors import invalid, renaming
from services.gateway.fields import refuse_unsupported
from services.gateway.request import Context, GenerationRequest
from services.gateway.sampling_fields import SamplingFields, Stops
from services.gateway.shape import Shape
from services.gateway.tools import MAX_TOOLS, FunctionName
from shared.messages import Prompt

# Field -> the values that ask for nothing. All else is in fields.py.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "max_completion_tokens": (),  # other routes' names
    "n": (1,),
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _own_only(tools: Any) -> Any:
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            message = f"tools[{place}]: tools of type {str(kind)[:40]!r} are not supported."
            raise invalid(message, "tools", "unsupported_value")
    return tools


class ToolBody(RequestBody):
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False


class ToolChoiceBody(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingBody(RequestBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] = "summarized"


class OutputConfig(RequestBody):
    format: dict[str, Any] | None = None
    effort: Annotated[str, StringConstraints(max_length=20)] | None = None


class Metadata(RequestBody):
    user_id: str | None = None


class ConversationBody(DialectBody):
    """What is asked, without how it is to be answered."""

    param_names: ClassVar[Mapping[str, str]] = {"response_format": "output_config.format"}

    messages: list[Any]  # checked in messages_input.py
    system: Any = None
    tools: Annotated[
        list[ToolBody], FailFast(), Field(max_length=MAX_TOOLS), BeforeValidator(_own_only)
    ] = Field(default_factory=list)
    tool_choice: ToolChoiceBody = Field(default_factory=lambda: ToolChoiceBody(type="auto"))
    thinking: ThinkingBody | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)

    def to_prompt(self, context: Context) -> Prompt:
        """Raises ApiError."""
        (prompt,) = self.chat().prompts(context)
        return prompt

    def chat(self, **more: Any) -> ChatBody:
        """The same as a chat, with these fields, too; raises ApiError."""
        refuse_unsupported(self.extra, UNSUPPORTED)
        messages = read_messages(self.messages, self.system)
        begun = messages[-1]["role"] == "assistant"  # the answer, by the client
        if begun and messages[-1].get("tool_calls"):
            raise invalid("messages: the result of the last tool_use is missing.", "messages")
        chat = {
            **more,
            **self._response_format(),
            "messages": messages,
            "add_generation_prompt": not begun,
            "continue_final_message": begun,
            "tools": [_chat_tool(tool) for tool in self.tools],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "chat_template_kwargs": self._template_variables(),
        }
        return ChatBody.model_validate(chat)

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if choice.type == "auto" and not self.tools:
            return "none"
        if choice.type != "tool":
            return CHOICES[choice.type]
        if choice.name is None:
            raise invalid("tool_choice.name: is missing.", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}

    def _template_variables(self) -> dict[str, Any]:
        effort, thinking = self.output_config.effort, self.thinking
        known = {} if effort is None else {"reasoning_effort": effort}
        if thinking is not None and thinking.type != "adaptive":
            known |= thinking_variables(thinking.type != "disabled")
        return known

    def _response_format(self) -> dict[str, Any]:
        format = self.output_config.format
        if format is None:
            return {}
        if format.get("type") != "json_schema":
            message = "output_config.format.type: must be json_schema."
            raise invalid(message, "output_config")
        schema = {"schema": format.get("schema")}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}


class MessagesBody(ConversationBody, SamplingFields):
    max_tokens: Tokens
    stop_sequences: Stops = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=Metadata)
    stream: bool = False

    def to_request(self, context: Context) -> GenerationRequest:
        own = self.model_dump(include=set(SamplingFields.model_fields), exclude_unset=True)
        stops = {"stop": self.stop_sequences} if self.stop_sequences else {}
        chat = self.chat(
            **(own | stops),
            max_tokens=self.max_tokens,
            user=self.metadata.user_id,
            stream=self.stream,
        )
        with renaming(self.param_names):
            return with_thoughts_counted(chat.to_request(context), context)

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        omitted = self.thinking is not None and self.thinking.display == "omitted"
        return MessagesShape(request, show_thoughts=not omitted)


def _chat_tool(tool: ToolBody) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}

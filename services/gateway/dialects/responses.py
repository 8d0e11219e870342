"""/v1/responses: OpenAI's Responses API, without anything that would have to be kept for later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field

from services.gateway.body import INT32_MAX, RequestBody, Tokens
from services.gateway.chat_terms import thinking_variables, with_thoughts_counted
from services.gateway.dialect import DialectBody
from services.gateway.dialects.chat import ChatBody
from services.gateway.dialects.responses_input import read_input
from services.gateway.dialects.responses_shape import ResponsesShape
from services.gateway.errors import invalid, renaming
from services.gateway.fields import refuse_unsupported
from services.gateway.generation_body import Alternatives, Salt
from services.gateway.request import Context, GenerationRequest
from services.gateway.sampling_fields import SamplingFields
from services.gateway.shape import Shape, dump
from services.gateway.tools import MAX_TOOLS, FunctionBody

# Field -> the values that ask for nothing. All else is in fields.py.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),  # responses are not kept
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "max_tokens": (),  # other routes' names
    "max_completion_tokens": (),
    "n": (1,),
    "logprobs": (False,),
    "messages": (),
}
LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    # What is always there, or only with what is not served
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


def _functions_only(tools: Any) -> Any:
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if kind != "function":
            message = f"tools[{place}]: tools of type {str(kind)[:40]!r} are not supported."
            raise invalid(message, "tools", "unsupported_value")
    return tools


class ToolBody(FunctionBody):
    type: Literal["function"] = "function"


class TextOptions(RequestBody):
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    verbosity: str = "medium"


class ReasoningOptions(RequestBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(DialectBody, SamplingFields):
    param_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    input: Any  # its forms are told apart in responses_input.py
    instructions: str | None = None
    tools: Annotated[
        list[ToolBody], FailFast(), Field(max_length=MAX_TOOLS), BeforeValidator(_functions_only)
    ] = Field(default_factory=list)
    tool_choice: Any = "auto"  # its forms are told apart below
    parallel_tool_calls: bool = True
    max_output_tokens: Tokens | None = None
    top_logprobs: Alternatives = 0
    include: Annotated[list[Include], FailFast()] = Field(default_factory=list)
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    metadata: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    user: str | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    cache_salt: Salt | None = None

    def to_request(self, context: Context) -> GenerationRequest:
        refuse_unsupported(self.extra, UNSUPPORTED)
        if self.text.verbosity != "medium":
            raise invalid("text.verbosity is not supported here.", "text", "unsupported_parameter")
        chat = self._chat()
        with renaming(self.param_names):
            return with_thoughts_counted(chat.to_request(context), context)

    def to_shape(self, request: GenerationRequest, context: Context) -> Shape:
        echoed = self._echoed(request)
        try:
            dump(echoed)
        except ValueError:
            raise invalid("body: NaN and numbers beyond all bounds are no JSON.") from None
        return ResponsesShape(request, echoed)

    def _chat(self) -> ChatBody:
        """The same as a chat."""
        same = set(SamplingFields.model_fields) | {"user", "priority", "cache_salt"}
        tools = [_chat_tool(tool) for tool in self.tools]
        chat: dict[str, Any] = {
            **self.model_dump(include=same, exclude_unset=True),
            **self._response_format(),
            "messages": read_input(self.input, self.instructions),
            "tools": tools,
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self._template_variables(),
            "max_tokens": self.max_output_tokens,
            "logprobs": self.top_logprobs > 0 or LOGPROBS in self.include,
            "top_logprobs": self.top_logprobs,
            "stream": self.stream,
        }
        return ChatBody.model_validate(chat)

    def _response_format(self) -> dict[str, Any]:
        format = dict(self.text.format)
        if format.get("type") == "json_schema":
            names = ("name", "schema", "strict", "description")
            format["json_schema"] = {name: format.pop(name) for name in names if name in format}
        return {"response_format": format} if "format" in self.text.model_fields_set else {}

    def _tool_choice(self) -> Any:
        match self.tool_choice:
            case "auto" if not self.tools:
                return "none"
            case "none" | "auto" | "required":
                return self.tool_choice
            case {"type": "function", "name": str(name)}:
                return {"type": "function", "function": {"name": name}}
            case {"type": str(kind)} if kind != "function":
                message = f"tool_choice: the type {kind[:40]!r} is not supported."
                raise invalid(message, "tool_choice", "unsupported_value")
        raise invalid(
            'tool_choice: must be "none", "auto", "required" or {"type": "function", "name": ...}.',
            "tool_choice",
        )

    def _template_variables(self) -> dict[str, Any]:
        effort = self.reasoning.effort
        if effort is None:
            return {}
        off = thinking_variables(False) if effort == "none" else {}
        return {"reasoning_effort": effort, **off}

    def _echoed(self, request: GenerationRequest) -> dict[str, Any]:
        """What the response repeats of the request, with the defaults that were taken."""
        reasoning, extra = self.reasoning, self.extra
        return {
            "model": request.model,
            "instructions": self.instructions,
            "tools": [_echoed_tool(tool) for tool in self.tools],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_logprobs": self.top_logprobs,
            "text": {"format": self.text.format, "verbosity": self.text.verbosity},
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "metadata": self.metadata,
            "user": self.user,
            "safety_identifier": extra.get("safety_identifier"),
            "prompt_cache_key": extra.get("prompt_cache_key"),
            "service_tier": "default",
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "max_tool_calls": None,
        }


def _chat_tool(tool: ToolBody) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_unset=True)
    return {"type": "function", "function": function}


def _echoed_tool(tool: ToolBody) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }

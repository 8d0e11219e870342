"""The fields of a request that are about tools, and what they come to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, StringConstraints

from services.gateway.body import RequestBody
from services.gateway.errors import ApiError, invalid
from services.gateway.tool_use import Function, ToolChoice, ToolUse

MAX_TOOLS = 128
CHOICES = {"auto": ToolChoice.AUTO, "required": ToolChoice.REQUIRED}

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]


class FunctionBody(RequestBody):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool = False


class ToolBody(RequestBody):
    type: Literal["function"]
    function: FunctionBody


class ToolFields(RequestBody):
    """As OpenAI names them."""

    tools: Annotated[list[ToolBody], FailFast(), Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: Any = None  # its forms are told apart below
    parallel_tool_calls: bool = True

    def tool_use(self) -> ToolUse | None:
        """None where no calls are to be made; raises ApiError."""
        functions = [tool.function for tool in self.tools]
        names = [function.name for function in functions]
        for place, function in enumerate(functions):
            if function.name in names[:place]:
                raise _invalid(f"tools[{place}].function.name", f"{function.name!r} comes twice")
            _check_schema(f"tools[{place}].function.parameters", function.parameters)
        return self._use([_function(function) for function in functions])

    def told_tools(self) -> list[dict[str, Any]]:
        """What a template is given; a request that wants no calls does not tell of tools."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def _use(self, functions: list[Function]) -> ToolUse | None:
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if choice == "none" or (choice is None and not functions):
            return None
        named = _named(choice)
        if choice not in (None, *CHOICES) and named is None:
            raise _invalid(
                "tool_choice",
                'must be "none", "auto", "required" or'
                ' {"type": "function", "function": {"name": ...}}',
            )
        if not functions:
            raise _invalid("tool_choice", "is only for requests with tools")
        if named is None:
            return ToolUse(functions, CHOICES[choice or "auto"], parallel)
        chosen = [function for function in functions if function.name == named]
        if not chosen:
            raise _invalid("tool_choice", f"there is no function {named[:64]!r} in tools")
        return ToolUse(chosen, ToolChoice.NAMED, parallel)


def _named(choice: Any) -> str | None:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


def _function(body: FunctionBody) -> Function:
    return Function(body.name, body.parameters, body.strict)


def _check_schema(at: str, schema: dict[str, Any] | None) -> None:
    """That it is one of an object; all else is checked where it is enforced."""
    if not schema:
        return
    if schema.get("type", "object") != "object":
        raise _invalid(f"{at}.type", 'must be "object"')
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise _invalid(f"{at}.properties", "must be an object")
    for name, property in properties.items():
        if not isinstance(property, dict | bool):
            raise _invalid(f"{at}.properties.{name[:64]}", "must be a JSON schema")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _invalid(f"{at}.required", "must be a list of names")


def _invalid(at: str, what: str) -> ApiError:
    param = at.partition("[")[0]
    return invalid(f"{at}: {what}.", param)

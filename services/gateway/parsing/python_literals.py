"""The keyword arguments of a Python call as JSON. Only literals are read; nothing is run."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

JSON_NAMES = {"true": True, "false": False, "null": None}  # models mix the languages


def read_keywords(texts: list[str]) -> str | None:
    """JSON of an object for `a=1` and `b="x"`; None for anything else.

    Words that Python reserves, such as `from`, are names here.
    """
    *others, last = texts
    given = texts if last.strip() else others  # none at all, or a comma behind the last
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            pairs = [_pair(text) for text in given]
        if len(dict(pairs)) < len(pairs):
            return None
        found = json.dumps(dict(pairs), ensure_ascii=False, allow_nan=False)
        found.encode()  # no half characters
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ValueError("not a keyword argument")
    return name.strip(), _value(ast.parse(f"({value}\n)", mode="eval").body)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("an object's keys are texts")

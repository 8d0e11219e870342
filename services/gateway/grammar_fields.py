"""The fields that say what form an answer must have: OpenAI's, vLLM's, and vLLM's former ones.

Whether a grammar can be followed is found out by the tokenizer; here it is only read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.errors import invalid
from shared.sampling import Grammar, GrammarKind

MAX_SOURCE_CHARS = 1 << 20
# JSON on one line, or indented as people do; without a bound small models write space for ever.
WHITESPACE = r"[ \t]?|\n[ \t]{0,40}"

FIELDS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
    }
)
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
OPTIONS = {  # beside a constraint in `structured_outputs`
    "disable_fallback": bool,  # there is nothing to fall back to
    "disable_any_whitespace": bool,
    "disable_additional_properties": bool,
    "whitespace_pattern": str,
}


def read_grammar(fields: Mapping[str, Any]) -> Grammar | None:
    """What these fields ask for together, at most one constraint; others are not looked at.

    Raises ApiError.
    """
    given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    for name, kind in (("guided_decoding_backend", str), ("guided_whitespace_pattern", str)):
        _check_kind(given.get(name, ""), kind, name)
    whitespace = given.get("guided_whitespace_pattern")
    options = {} if whitespace is None else {"whitespace_pattern": whitespace}
    asked: dict[str, Grammar] = {}
    for short in CONSTRAINTS[:4]:
        name = f"guided_{short}"
        if name in given and given[name] != []:
            asked[name] = _constraint(short, given[name], options, name, name)
    for name, read in (("structured_outputs", _structured), ("response_format", _response_format)):
        grammar = read(given[name]) if name in given else None
        if grammar is not None:
            asked[name] = grammar
    if len(asked) > 1:
        names = sorted(asked)
        raise invalid(f"Only one of {', '.join(names)} can be given.", names[0])
    return next(iter(asked.values()), None)


def _response_format(value: Any) -> Grammar | None:
    param = "response_format"
    kind = _object(value, param, param).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _constraint("json_object", True, {}, param, param)
    if kind != "json_schema":
        raise invalid(f"{param}.type: must be text, json_object or json_schema.", param)
    outer = _object(value.get("json_schema"), f"{param}.json_schema", param)
    _check_kind(outer.get("name") or "", str, f"{param}.json_schema.name", param)
    _check_kind(outer.get("strict") or False, bool, f"{param}.json_schema.strict", param)
    schema = _object(outer.get("schema"), f"{param}.json_schema.schema", param)
    return _constraint("json", schema, {}, f"{param}.json_schema.schema", param)


def _structured(value: Any) -> Grammar | None:
    param = "structured_outputs"
    given = {
        name: one for name, one in _object(value, param, param).items() if one not in (None, [])
    }
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    for name, option in options.items():
        _check_kind(option, OPTIONS[name], f"{param}.{name}", param)
    unknown = sorted(given.keys() - set(CONSTRAINTS))
    if unknown:
        raise invalid(f"{param}.{unknown[0][:100]}: is not supported.", param)
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) > 1:
        raise invalid(f"{param}: only one of {', '.join(sorted(given))} can be given.", param)
    for name, constraint in given.items():
        return _constraint(name, constraint, options, f"{param}.{name}", param)
    return None


def _constraint(
    name: str, value: Any, options: Mapping[str, Any], place: str, param: str
) -> Grammar:
    read: dict[str, tuple[GrammarKind, Callable[[], str]]] = {
        "json": (GrammarKind.JSON_SCHEMA, lambda: _schema(value, options, place, param)),
        "json_object": (GrammarKind.JSON_SCHEMA, lambda: _any_object(value, options, place, param)),
        "regex": (GrammarKind.REGEX, lambda: _text(value, place, param)),
        "grammar": (GrammarKind.LARK, lambda: _text(value, place, param)),
        "choice": (GrammarKind.REGEX, lambda: _choice(value, place, param)),
    }
    kind, source = read[name][0], read[name][1]()
    if len(source) > MAX_SOURCE_CHARS:
        raise invalid(f"{place}: has more than {MAX_SOURCE_CHARS} characters.", param)
    return Grammar(kind, source)


def _schema(value: Any, options: Mapping[str, Any], place: str, param: str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid(f"{place}: is not JSON: {error}", param) from None
    schema = dict(_object(value, place, param))
    try:
        if options.get("disable_additional_properties"):
            schema = _closed(schema)
        # The library reads its options from the schema; those of the client come first.
        return json.dumps({"x-guidance": _json_options(options), **schema})
    except RecursionError:
        raise invalid(f"{place}: is nested too deeply.", param) from None


def _any_object(value: Any, options: Mapping[str, Any], place: str, param: str) -> str:
    _check_kind(value, bool, place, param)
    return _schema({"type": "object"}, options, place, param)


def _json_options(options: Mapping[str, Any]) -> dict[str, Any]:
    if options.get("disable_any_whitespace"):
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": options.get("whitespace_pattern", WHITESPACE)}


def _closed(schema: Any) -> Any:
    """With objects that have the properties named and no others, unless they say it themselves."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(one) for name, one in schema.items()}
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _choice(value: Any, place: str, param: str) -> str:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise invalid(f"{place}: must be a list of texts that are not empty.", param)
    return "|".join(re.escape(_text(one, place, param)) for one in value)


def _text(value: Any, place: str, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(f"{place}: must be a text that is not empty.", param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(f"{place}: has a lone surrogate, which is no character.", param) from None
    return value


def _object(value: Any, place: str, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(f"{place}: must be an object.", param)
    return value


def _check_kind(value: Any, kind: type, place: str, param: str | None = None) -> None:
    if not isinstance(value, kind):
        words = {str: "a text", bool: "true or false"}
        raise invalid(f"{place}: must be {words[kind]}.", param or place)

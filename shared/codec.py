"""Messages to frames and back: msgpack arrays, decoded strictly against the dataclasses' types.

A frame is `[version, tag, service, name, incarnation, sent, [field, ...]]`. Nothing in a frame
is trusted: any deviation, from a type or from its bounds, raises `BadFrame`, and nothing else is
ever raised by `decode`.
"""

from __future__ import annotations

import math
import types
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

import msgpack

from shared.bounds import INT32_MAX, AtMost, Within
from shared.messages import REGISTRY, Message
from shared.types import (
    Handle,
    Incarnation,
    RequestId,
    ServiceName,
    int32s_from_bytes,
    int32s_to_bytes,
)

VERSION = 7
MAX_FRAME_BYTES = 32 * 1024 * 1024  # a 4 MiB body of ids stays far below this
MAX_ITEMS = 1 << 20  # in all lists of a frame: one byte of it can be 60 of memory
MAX_NAME = 255  # characters

# Of types of their own: as those of fields that are `Annotated`.
BOUNDS: dict[Any, Within | AtMost] = {RequestId: AtMost(128), Handle: Within(0, INT32_MAX)}

Convert = Callable[[Any], Any]


class BadFrame(ValueError):
    """A frame that is not a message of this mesh; the text says why, and quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a message."""

    service: ServiceName
    name: str  # as discovery knows it
    incarnation: Incarnation


def encode(message: Message, sender: Identity, sent: int = 0) -> bytes:
    """The frame of `message`; `sent` is the sender's monotonic time, ns."""
    kind = type(message)
    header = [VERSION, _TAGS[kind], sender.service, sender.name, sender.incarnation, sent]
    frame: bytes = msgpack.packb([*header, _ENCODERS[kind](message)])
    return frame


def decode(frame: bytes) -> tuple[Message, Identity, int]:
    """The message in `frame`, its sender and when it was sent; raises BadFrame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(frame)} bytes is over {MAX_FRAME_BYTES}")
    try:
        parts = _unpacked(frame)
        if type(parts) is not list or len(parts) != 7:
            raise BadFrame("not an array of 7")
        version, tag, service, name, incarnation, sent, body = parts
        if _integer(version) != VERSION:
            raise BadFrame(f"version {version} is not {VERSION}")
        kind = REGISTRY.get(_integer(tag))
        if kind is None:
            raise BadFrame(f"unknown tag {tag}")
        sender = Identity(_service(service), _name(name), Incarnation(_integer(incarnation)))
        return _DECODERS[kind](body), sender, _integer(sent)
    except BadFrame:
        raise
    except Exception as error:  # msgpack, UTF-8, enums and __post_init__ raise many kinds
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error


def _unpacked(frame: bytes) -> Any:
    left = MAX_ITEMS

    def counted(items: list[Any]) -> list[Any]:
        nonlocal left
        left -= len(items)
        if left < 0:
            raise BadFrame(f"more than {MAX_ITEMS} items")
        return items

    return msgpack.unpackb(
        frame,
        list_hook=counted,
        max_array_len=MAX_ITEMS,
        max_map_len=0,  # there are no maps in messages,
        max_ext_len=0,  # nor types of msgpack's own
    )


def _integer(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise BadFrame(f"expected an int64, got {type(value).__name__}")
    return value


def _exactly(kind: type) -> Convert:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise BadFrame(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return check


_string = _exactly(str)
_float = _exactly(float)
_SERVICES = {str(service): service for service in ServiceName}


def _service(value: Any) -> ServiceName:
    found = _SERVICES.get(_string(value))
    if found is None:
        raise BadFrame("unknown service")
    return found


def _finite(value: Any) -> Any:
    if not math.isfinite(_float(value)):
        raise BadFrame("a number that is not finite")
    return value


def _bounded(convert: Convert, bound: Within | AtMost) -> Convert:
    if isinstance(bound, AtMost):
        longest = bound.length

        def short(value: Any) -> Any:
            if type(value) in (str, list) and len(value) > longest:
                raise BadFrame(f"longer than {longest}")
            return convert(value)

        return short
    least, most = bound.least, bound.most

    def within(value: Any) -> Any:
        converted = convert(value)
        if not least <= converted <= most:
            raise BadFrame(f"not from {least} to {most}")
        return converted

    return within


_name = _bounded(_string, AtMost(MAX_NAME))


def _integer_or_string(value: Any) -> Any:
    return _integer(value) if type(value) is int else _string(value)


def _same(value: Any) -> Any:
    return value


def _int32s(value: Any) -> Any:
    return int32s_from_bytes(_exactly(bytes)(value))


def _list(convert: Convert) -> Convert:
    check = _exactly(list)
    return lambda value: [convert(item) for item in check(value)]


def _codec_of(hint: Any) -> tuple[Convert, Convert]:
    """The (encode, decode) pair for a field's type."""
    if isinstance(hint, NewType):
        to_wire, from_wire = _codec_of(hint.__supertype__)
        return to_wire, _bounded(from_wire, BOUNDS[hint]) if hint in BOUNDS else from_wire
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *bounds = get_args(hint)
        to_wire, from_wire = _codec_of(inner)
        for bound in bounds:
            from_wire = _bounded(from_wire, bound)
        return to_wire, from_wire
    if hint is array:
        return int32s_to_bytes, _int32s
    if origin is list:
        to_wire, from_wire = _codec_of(get_args(hint)[0])
        return (lambda value: [to_wire(item) for item in value]), _list(from_wire)
    if origin in (types.UnionType, Union):
        return _union_codec(get_args(hint))
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_codec(hint)
    if issubclass(hint, IntEnum):
        return int, lambda value: hint(_integer(value))
    if hint is int:
        return _same, _integer
    if hint is float:
        return float, _finite
    if hint in (bool, str, bytes):
        return _same, _exactly(hint)
    raise TypeError(f"no wire form for {hint!r}")


def _union_codec(options: tuple[Any, ...]) -> tuple[Convert, Convert]:
    """Optional[X], or a union of scalars (told apart by their msgpack type)."""
    rest = [option for option in options if option is not type(None)]
    if len(rest) == 1:
        inner_to, inner_from = _codec_of(rest[0])
    elif set(rest) == {int, str}:
        inner_to, inner_from = _same, _integer_or_string
    else:
        raise TypeError(f"no wire form for the union {options!r}")
    if len(rest) == len(options):
        return inner_to, inner_from
    return (
        lambda value: None if value is None else inner_to(value),
        lambda value: None if value is None else inner_from(value),
    )


def _dataclass_codec(kind: type) -> tuple[Convert, Convert]:
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]
    codecs = [_codec_of(hints[name]) for name in names]
    getters = [(name, encode) for name, (encode, _) in zip(names, codecs, strict=True)]
    decoders = [decode for _, decode in codecs]

    def to_wire(value: Any) -> list[Any]:
        return [convert(getattr(value, name)) for name, convert in getters]

    def from_wire(value: Any) -> Any:
        if type(value) is not list or len(value) != len(names):
            raise BadFrame(f"{kind.__name__} has {len(names)} fields")
        return kind(*[convert(item) for convert, item in zip(decoders, value, strict=True)])

    return to_wire, from_wire


_TAGS: dict[type[Message], int] = {kind: tag for tag, kind in REGISTRY.items()}
_ENCODERS: dict[type[Message], Convert] = {}
_DECODERS: dict[type[Message], Convert] = {}
for _kind in _TAGS:
    _ENCODERS[_kind], _DECODERS[_kind] = _dataclass_codec(_kind)

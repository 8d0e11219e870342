"""The vocabulary that every service shares."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NewType, TypeAlias

RequestId = NewType("RequestId", str)  # one sequence's id, unique in the mesh
Handle = NewType("Handle", int)  # int32; a scheduler's name for a request, rising, never reused
Incarnation = NewType("Incarnation", int)  # random 63 bits, new with each process

# Token ids, block ids and all per-row columns: int32, little-endian on the wire.
if TYPE_CHECKING:
    Int32s: TypeAlias = array[int]
else:
    Int32s = array  # not subscriptable before Python 3.12


def int32s(values: Iterable[int] = ()) -> Int32s:
    """An int32 column; raises OverflowError for a value outside int32."""
    return array("i", values)


def int32s_from_bytes(raw: bytes) -> Int32s:
    """Read a little-endian int32 buffer; raises ValueError if it does not hold whole items."""
    column = array("i")
    column.frombytes(raw)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def int32s_to_bytes(column: Int32s) -> bytes:
    """The little-endian bytes of an int32 column."""
    if sys.byteorder == "big":
        column = array("i", column)
        column.byteswap()
    return column.tobytes()


# How a process ends that could not do what it was to do.
EXIT_FAULT = 1
EXIT_BAD_SETTING = 2  # and whoever started it can mend it


class ServiceName(StrEnum):
    """The services of the mesh; the value is the name in paths, DNS and on the command line."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    MODEL_EXECUTOR = "model-executor"
    DETOKENIZER = "detokenizer"


class State(IntEnum):
    """Where an instance is in its life."""

    LOADING = 0
    READY = 1
    LEAVING = 2  # it finishes what it has


class FinishReason(IntEnum):
    """Why a sequence ended; 0 while it goes on."""

    NONE = 0
    STOP = 1  # an end-of-sequence id, a stop token id or a stop string
    LENGTH = 2  # max_tokens, or the end of the context
    ABORT = 3  # the client left, or the server gave it up on purpose
    ERROR = 4  # a fault; the error says which

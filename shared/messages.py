"""Everything that crosses the mesh: one frozen dataclass per message, each with a fixed tag.

A message's fields travel in their order here; a change of any of them is a new `VERSION` in
`shared.codec`, and the golden bytes in the tests change with it.
"""

from __future__ import annotations

import struct
from collections.abc import Sized
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, TypeAlias

from shared.bounds import (
    INT32_MAX,
    MAX_BLOCKS,
    MAX_SLOTS,
    Count,
    Line,
    Name,
    Number,
    Within,
)
from shared.sampling import SamplingParams
from shared.types import FinishReason, Handle, Incarnation, Int32s, RequestId, State, int32s

FLOAT_BYTES = 4

Size: TypeAlias = Annotated[int, Within(1, INT32_MAX)]


def _check_columns(first: Sized, *others: Sized) -> None:
    if any(len(other) != len(first) for other in others):
        raise ValueError("columns of unequal length")


def _check_ids(*columns: Int32s) -> None:
    """Of tokens; what there is beyond 0 depends on the model."""
    if any(min(column, default=0) < 0 for column in columns):
        raise ValueError("a negative token id or position")


def _check_pairs(counts: Int32s, token_ids: Int32s, values: bytes) -> None:
    if min(counts, default=0) < 0 or sum(counts) != len(token_ids):
        raise ValueError("counts that do not add up")
    if len(values) != FLOAT_BYTES * len(token_ids):
        raise ValueError("columns of unequal length")
    _check_floats(values)


def _check_floats(values: bytes) -> None:
    """Raises struct.error for a part of one."""
    if not isfinite(sum(struct.unpack(f"<{len(values) // FLOAT_BYTES}f", values))):
        raise ValueError("values that are not finite")


# --- parts of messages --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue: exactly one of text, token ids, or a chat as JSON."""

    text: str | None = None
    token_ids: Int32s | None = None
    chat: str | None = None  # JSON: {"messages": [...], "add_generation_prompt": bool, ...}
    add_special_tokens: bool = True
    truncate_to: int | None = None  # tokens: only so many of its last ones count
    chat_template: str | None = None  # Jinja source, instead of the model's own

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.text, self.token_ids, self.chat)) != 1:
            raise ValueError("a prompt is exactly one of text, token_ids and chat")


@dataclass(frozen=True, slots=True)
class Route:
    """The instances that carry a request; decided once, by the gateway."""

    gateway: Name
    detokenizer: Name


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal or fault, in the terms of OpenAI's error object."""

    status: Annotated[int, Within(400, 599)]  # HTTP status
    message: Line
    param: Line | None = None
    code: Line | None = None


@dataclass(frozen=True, slots=True)
class EnteringSequence:
    """A sequence that takes a slot of the executor's persistent batch."""

    slot: Count
    handle: Handle
    detokenizer: Name
    prompt_tokens: Count  # how many of token_ids are prompt; the rest was generated before
    params: SamplingParams  # max_tokens is set
    token_ids: Int32s  # all tokens known so far


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the model thought of tokens: of sampled ones, and of a prompt's as it is computed.

    Entry i is of the token at `positions[i]` in the sequence `handles[i]`: `counts[i]` pairs of
    `token_ids` and `values`, the token's own first, then the likeliest in falling order. They are
    of the model's own distribution, before penalties, bias, temperature and filters.
    """

    handles: Int32s
    positions: Int32s
    ranks: Int32s  # of the token itself; the likeliest has 1
    counts: Int32s
    token_ids: Int32s
    values: bytes  # natural logarithms: finite, float32, little-endian

    def __post_init__(self) -> None:
        _check_columns(self.handles, self.positions, self.ranks, self.counts)
        _check_pairs(self.counts, self.token_ids, self.values)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The hidden state of a prompt's last token, normalised."""

    handle: Handle
    vector: bytes  # float32, little-endian

    def __post_init__(self) -> None:
        _check_floats(self.vector)


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Consecutive tokens of one request, for a client that wants to hear of tokens.

    Of each token: its id, its bytes, and where its text begins. `counts` says how many pairs of
    `pair_ids`, `pair_pieces` and `values` each has, as in `Logprobs`; 0 if nothing was asked, or
    if it is the first of a prompt.
    """

    request_id: RequestId
    position: Count  # of the first of them; the prompt's first is 0
    token_ids: Int32s
    pieces: list[bytes]
    text_offsets: Int32s  # characters of the answer before each
    ranks: Int32s  # 0 where there are no pairs
    counts: Int32s
    pair_ids: Int32s
    pair_pieces: list[bytes]
    values: bytes  # float32, little-endian

    def __post_init__(self) -> None:
        _check_columns(self.token_ids, self.pieces, self.text_offsets, self.ranks, self.counts)
        _check_columns(self.pair_ids, self.pair_pieces)
        _check_pairs(self.counts, self.pair_ids, self.values)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request, with its exact counts."""

    request_id: RequestId
    reason: FinishReason
    completion_tokens: Count
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    failure: Failure | None = None
    embedding: bytes = b""  # float32, little-endian

    def __post_init__(self) -> None:
        _check_floats(self.embedding)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of many that tell how an instance is."""

    name: Name
    value: float


@dataclass(frozen=True, slots=True)
class Status:
    """How an instance is."""

    state: State
    host: Name
    pid: Count
    age: float  # seconds since it was started
    load: list[Figure]


NEWEST = -1  # the start of a row that decodes

# --- messages, in the order of a request's life --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """gateway -> tokenizer: continue this prompt."""

    request_id: RequestId
    prompt: Prompt
    params: SamplingParams
    route: Route
    tenant: Name = ""  # whom it is served for; tenants share fairly
    priority: int = 0  # lower is more urgent
    cache_salt: Line = ""  # KV is shared only between requests of the same


@dataclass(frozen=True, slots=True)
class Refused:
    """tokenizer or scheduler -> gateway: this request was not taken."""

    request_id: RequestId
    failure: Failure


@dataclass(frozen=True, slots=True)
class Submit:
    """tokenizer -> scheduler: a checked request, ready to be queued.

    detokenizer -> scheduler: one that ran before, with all its tokens that are known there: go on
    from these, for a scheduler, an executor or some tokens were lost.
    """

    request_id: RequestId
    token_ids: Int32s
    params: SamplingParams  # max_tokens None: as many as the cache and the context hold
    route: Route
    tenant: Name = ""
    priority: int = 0
    cache_salt: Line = ""
    output_tokens: Count | None = None  # it ran before, and so many of its tokens were generated

    def __post_init__(self) -> None:
        if not 0 <= (self.output_tokens or 0) <= len(self.token_ids):
            raise ValueError("more tokens generated than there are")


@dataclass(frozen=True, slots=True)
class Open:
    """scheduler -> detokenizer: tokens of `handle` (of the sending incarnation) will come."""

    request_id: RequestId
    handle: Handle
    gateway: Name
    token_ids: Int32s  # the prompt, and what was generated before
    params: SamplingParams
    output_tokens: Count = 0  # so many of token_ids were generated
    tenant: Name = ""
    priority: int = 0
    cache_salt: Line = ""

    def __post_init__(self) -> None:
        _check_ids(self.token_ids)
        if not 0 <= self.output_tokens <= len(self.token_ids):
            raise ValueError("more tokens generated than there are")


@dataclass(frozen=True, slots=True)
class Accepted:
    """detokenizer -> gateway: the request is in the mesh's hands; `scheduler` has it.

    It comes again, maybe from another detokenizer, when the request was handed on after a loss.
    """

    request_id: RequestId
    prompt_tokens: Count
    scheduler: Name


@dataclass(frozen=True, slots=True)
class Admitted:
    """scheduler -> gateway: the request runs now, and so much was cached.

    Sent only if anything was, or if requests are traced.
    """

    request_id: RequestId
    cached_tokens: Count  # of the prompt


@dataclass(frozen=True, slots=True)
class Announce:
    """model-executor -> scheduler: what I can hold, with nothing in it now."""

    fingerprint: Name  # of model and dtype; every executor of one scheduler has the same
    num_blocks: Annotated[int, Within(1, MAX_BLOCKS)]
    block_size: Size  # tokens
    max_num_seqs: Annotated[int, Within(1, MAX_SLOTS)]
    max_num_batched_tokens: Size
    max_model_len: Size
    vocab_size: Size  # token ids are below it
    session: Number = 0  # rises whenever the executor drops what it held


@dataclass(frozen=True, slots=True)
class Plan:
    """scheduler -> model-executor: one iteration, as a change to the persistent batch.

    Applied in this order: `retired`, `entering`, blocks, then the rows are run. Row i computes
    `row_tokens[i]` tokens of slot `row_slots[i]` from position `row_starts[i]`; it samples if it
    reaches the last known token. A start of NEWEST is that of a decode: one token, the newest one
    wherever it is. Block ids are appended to the slots' block tables: the first `block_counts[0]`
    of them to slot `block_slots[0]`, and so on. The rows of a leased plan, all decodes, are run up
    to `lease` times more, as long as no newer plan has come. Where a grammar leaves one choice, a
    row that samples may first compute up to `jump` more tokens than it says, within the token
    budget. A plan made for a session that is over is not run.
    """

    step: Number
    retired: Int32s  # slots
    entering: list[EnteringSequence]
    block_slots: Int32s
    block_counts: Int32s
    block_ids: Int32s
    row_slots: Int32s
    row_starts: Int32s
    row_tokens: Int32s
    lease: Count = 0
    session: Number = 0  # of the Announce that it builds on
    jump: Count = 0  # tokens

    def __post_init__(self) -> None:
        _check_columns(self.block_slots, self.block_counts)
        _check_columns(self.row_slots, self.row_starts, self.row_tokens)
        if sum(self.block_counts) != len(self.block_ids):
            raise ValueError("block counts that do not add up")


@dataclass(frozen=True, slots=True)
class StepResult:
    """model-executor -> scheduler and detokenizers: the tokens that one iteration brought.

    The scheduler's copy has those of every row; a detokenizer's has only its own. A row that
    jumps brings several: the KV of all but the last is computed. They stand together, in order.
    """

    epoch: Incarnation  # of the scheduler whose plan this was
    step: Number
    handles: Int32s
    positions: Int32s  # of the token in its sequence; the prompt's first is 0
    token_ids: Int32s
    finishes: bytes  # one FinishReason each
    iteration: Count = 0  # of the plan: above 0, one of its lease
    logprobs: Logprobs | None = None  # for detokenizers, of requests that want them
    embeddings: list[Embedding] = field(default_factory=list)  # for detokenizers

    def __post_init__(self) -> None:
        _check_columns(self.handles, self.positions, self.token_ids, self.finishes)
        _check_ids(self.positions, self.token_ids)
        if max(self.finishes, default=0) > max(FinishReason):
            raise ValueError("an unknown reason to finish")


@dataclass(frozen=True, slots=True)
class Deltas:
    """detokenizer -> gateway: new text of many requests, their tokens if wanted, then the ends."""

    request_ids: list[RequestId]
    texts: list[str]
    offsets: Int32s  # characters sent before this text
    token_counts: Int32s  # completion tokens so far, this text's included
    finished: list[Finished] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)  # before the ends

    def __post_init__(self) -> None:
        _check_columns(self.request_ids, self.texts, self.offsets, self.token_counts)


@dataclass(frozen=True, slots=True)
class Abort:
    """anyone -> the services that may know the request: stop it. Idempotent, may come early."""

    request_id: RequestId
    reason: Line


@dataclass(frozen=True, slots=True)
class Failed:
    """scheduler -> detokenizer: this request ended by a fault; tell its gateway."""

    request_id: RequestId
    failure: Failure


@dataclass(frozen=True, slots=True)
class Recall:
    """scheduler -> detokenizer: an executor was lost; submit again what you have of me.

    But not what ran elsewhere: `spared`.
    """

    number: Number  # which loss
    spared: Int32s = field(default_factory=int32s)  # handles


@dataclass(frozen=True, slots=True)
class Recalled:
    """detokenizer -> scheduler: that was all; what was not submitted again has ended here."""

    number: Number


@dataclass(frozen=True, slots=True)
class Released:
    """detokenizer -> scheduler: you have no executors, so another gets these requests."""

    request_ids: list[RequestId]


@dataclass(frozen=True, slots=True)
class Reopen:
    """gateway -> scheduler: I lost the detokenizer of this request; open it on another."""

    request_id: RequestId
    detokenizer: Name


@dataclass(frozen=True, slots=True)
class Gone:
    """scheduler -> gateway: what you want reopened has ended here, or never was; send it again."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Roster:
    """scheduler -> every model-executor: whom I have; sent when it changes."""

    executors: list[Name]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """model-executor -> scheduler: I am another's now; whatever you have me hold is gone."""


@dataclass(frozen=True, slots=True)
class Credit:
    """scheduler -> gateways, tokenizers: what I hold and what I can take; sent when it changes.

    scheduler -> detokenizers: the same, but sent only when what it can hold changes.
    """

    max_num_seqs: Count
    max_queue: Count
    running: Count
    waiting: Count


# --- the mesh itself -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaving:
    """everyone -> everyone it talks to: give me nothing new, I end when I have done what I have."""


# --- questions and answers -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encode:
    """gateway -> tokenizer: tokenize only."""

    request_id: RequestId
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Encoded:
    """tokenizer -> gateway."""

    request_id: RequestId
    token_ids: Int32s
    max_model_len: Count


@dataclass(frozen=True, slots=True)
class Decode:
    """gateway -> tokenizer: ids to text."""

    request_id: RequestId
    token_ids: Int32s


@dataclass(frozen=True, slots=True)
class Decoded:
    """tokenizer -> gateway."""

    request_id: RequestId
    text: str


@dataclass(frozen=True, slots=True)
class MetricsRequest:
    """gateway -> everyone: send your metrics."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class MetricsReply:
    """everyone -> gateway: Prometheus text exposition format."""

    request_id: RequestId
    exposition: str


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """gateway -> everyone: say how you are."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class StatusReply:
    """everyone -> gateway."""

    request_id: RequestId
    status: Status


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """gateway -> everyone: send what you noted in the last `window` ns."""

    request_id: RequestId
    window: Number


@dataclass(frozen=True, slots=True)
class TraceReply:
    """everyone -> gateway: events as `shared.trace.pack` leaves them."""

    request_id: RequestId
    now: Number  # by the sender's monotonic clock, ns
    names: list[str]
    events: bytes


Message = (
    Generate
    | Refused
    | Submit
    | Open
    | Accepted
    | Announce
    | Plan
    | StepResult
    | Deltas
    | Abort
    | Failed
    | Credit
    | Encode
    | Encoded
    | Decode
    | Decoded
    | MetricsRequest
    | MetricsReply
    | TraceRequest
    | TraceReply
    | Admitted
    | Recall
    | Recalled
    | Roster
    | Reopen
    | Gone
    | Leaving
    | StatusRequest
    | StatusReply
    | Withdraw
    | Released
)

# The wire's tags. Append only: a tag is never used again for another message.
REGISTRY: dict[int, type[Message]] = {
    1: Generate,
    2: Refused,
    3: Submit,
    4: Open,
    5: Accepted,
    6: Announce,
    7: Plan,
    8: StepResult,
    9: Deltas,
    10: Abort,
    11: Failed,
    12: Credit,
    13: Encode,
    14: Encoded,
    15: Decode,
    16: Decoded,
    17: MetricsRequest,
    18: MetricsReply,
    19: TraceRequest,
    20: TraceReply,
    21: Admitted,
    22: Recall,
    23: Recalled,
    24: Roster,
    25: Reopen,
    26: Gone,
    27: Leaving,
    28: StatusRequest,
    29: StatusReply,
    30: Withdraw,
    31: Released,
}

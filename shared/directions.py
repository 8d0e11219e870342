"""Who says what to whom: a message that comes another way is none."""

from __future__ import annotations

from collections.abc import Iterable

from shared import messages as m
from shared.types import ServiceName

G, T, S, E, D = ServiceName  # gateway, tokenizer, scheduler, model-executor, detokenizer
ALL = tuple(ServiceName)

Directions = frozenset[tuple[ServiceName, ServiceName]]  # from, to


def _from(senders: Iterable[ServiceName], *receivers: ServiceName) -> Directions:
    return frozenset((sender, receiver) for sender in senders for receiver in receivers)


DIRECTIONS: dict[type[m.Message], Directions] = {
    m.Generate: _from([G], T),
    m.Refused: _from([T, S], G),
    m.Submit: _from([T, D], S),
    m.Open: _from([S], D),
    m.Accepted: _from([D], G),
    m.Admitted: _from([S], G),
    m.Announce: _from([E], S),
    m.Plan: _from([S], E),
    m.StepResult: _from([E], S, D),
    m.Deltas: _from([D], G),
    m.Abort: _from(ALL, T, S, D),  # it comes early, late and twice anyway
    m.Failed: _from([S], D),
    m.Recall: _from([S], D),
    m.Recalled: _from([D], S),
    m.Released: _from([D], S),
    m.Reopen: _from([G], S),
    m.Gone: _from([S], G),
    m.Roster: _from([S], E),
    m.Withdraw: _from([E], S),
    m.Credit: _from([S], G, T, D),
    m.Encode: _from([G], T),
    m.Encoded: _from([T], G),
    m.Decode: _from([G], T),
    m.Decoded: _from([T], G),
    m.MetricsRequest: _from(ALL, *ALL),
    m.MetricsReply: _from(ALL, *ALL),
    m.TraceRequest: _from(ALL, *ALL),
    m.TraceReply: _from(ALL, *ALL),
    m.StatusRequest: _from(ALL, *ALL),
    m.StatusReply: _from(ALL, *ALL),
    m.Leaving: _from(ALL, *ALL),
}


def expected(message: m.Message, sender: ServiceName, receiver: ServiceName) -> bool:
    """Whether such a message goes this way."""
    return (sender, receiver) in DIRECTIONS.get(type(message), ())

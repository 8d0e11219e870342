"""What is known of one request: its tokens, and how far its text has come."""

from __future__ import annotations

from services.detokenizer.decoder import Decoders, TokenDecoder
from services.detokenizer.stop import StopMatcher
from shared.codec import Identity
from shared.messages import Finished, Open
from shared.types import FinishReason, int32s


class Journal:
    """One request from `Open` to its end.

    Positions: [0, prompt)     the prompt
               [prompt, next)  `output`, every token once
    Characters: [0, sent)      handed to the gateway
                [sent, ...)    held back: half a character, or what may become a stop string
    """

    __slots__ = (
        "_decoder",
        "_eos_token_ids",
        "_name_of",
        "_stops",
        "finished",
        "gateway",
        "handle",
        "next_position",
        "output",
        "params",
        "prompt",
        "request_id",
        "scheduler",
        "sent",
    )

    def __init__(
        self, opened: Open, scheduler: Identity, decoders: Decoders, eos_token_ids: frozenset[int]
    ) -> None:
        self.request_id = opened.request_id
        self.handle = opened.handle
        self.gateway = opened.gateway
        self.scheduler = scheduler
        self.params = params = opened.params
        self.prompt = opened.token_ids
        self.output = int32s()
        self.next_position = len(opened.token_ids)
        self.sent = 0
        self.finished: Finished | None = None
        self._eos_token_ids = eos_token_ids
        self._name_of = decoders.token
        self._decoder: TokenDecoder = decoders.open(
            opened.token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops: StopMatcher | None = None
        if params.stop:
            self._stops = StopMatcher(params.stop, include=params.include_stop_str_in_output)

    def take(self, token_id: int, finish: int) -> str:
        """Add the token at `next_position`; returns the text that can be sent now.

        At the end, which is the executor's `finish` or a stop string, `finished` is set.
        """
        self.output.append(token_id)
        self.next_position += 1
        if not finish and self._stops is None:
            return self._decoder.push(token_id)
        return self._take_checked(token_id, finish)

    def _take_checked(self, token_id: int, finish: int) -> str:
        text = "" if self._is_hidden(finish) else self._decoder.push(token_id)
        if finish:
            text += self._decoder.flush()
        if self._stops is not None:
            armed = len(self.output) > self.params.min_tokens
            text, stop = self._stops.feed(text, armed=armed)
            if stop is not None:
                self.finished = self._end(FinishReason.STOP, stop)
                return text
            if finish:
                text += self._stops.flush()
        if finish:
            stopped = finish == FinishReason.STOP
            reason = self._stop_reason(token_id) if stopped else None
            self.finished = self._end(FinishReason(finish), reason)
        return text

    def _is_hidden(self, finish: int) -> bool:
        """An end token is no text unless stop strings are asked for too."""
        return finish == FinishReason.STOP and not self.params.include_stop_str_in_output

    def _stop_reason(self, token_id: int) -> str | int | None:
        """What the client named; None for the model's own end."""
        name = self._name_of(token_id)
        if name in self.params.stop:
            return name
        own = token_id in self._eos_token_ids and not self.params.ignore_eos
        return None if own else token_id

    def _end(self, reason: FinishReason, stop_reason: str | int | None) -> Finished:
        return Finished(self.request_id, reason, len(self.output), stop_reason)

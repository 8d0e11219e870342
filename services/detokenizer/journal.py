"""What is known of one request: its tokens, and how far its text has come."""

from __future__ import annotations

from services.detokenizer.decoder import Decoders, TokenDecoder
from services.detokenizer.details import Entry, Teller
from services.detokenizer.stop import StopMatcher
from shared.codec import Identity
from shared.messages import Embedding, Failure, Finished, Open, Route, Submit
from shared.sampling import SamplingParams
from shared.types import FinishReason, int32s

LOGPROBS_LOST = Failure(500, "The prompt's logprobs were lost.", code="internal_error")
EMBEDDING_LOST = Failure(500, "The embedding was lost.", code="internal_error")


class Journal:
    """One request from `Open` to its end.

    Positions: [0, prompt)     the prompt
               [prompt, next)  `output`, every token once
    Characters: [0, sent)      handed to the gateway
                [sent, ...)    held back: half a character, or what may become a stop string
    An echoed prompt's characters come first, with those of the first token.
    """

    __slots__ = (
        "_decoded",
        "_decoder",
        "_embedding",
        "_eos_token_ids",
        "_name_of",
        "_plain",
        "_stops",
        "asked",
        "behind",
        "cache_salt",
        "finished",
        "gateway",
        "handle",
        "next_position",
        "output",
        "params",
        "priority",
        "prompt",
        "request_id",
        "resubmitted",
        "scheduler",
        "sent",
        "taken_from",
        "teller",
        "tenant",
    )

    def __init__(
        self, opened: Open, scheduler: Identity, decoders: Decoders, eos_token_ids: frozenset[int]
    ) -> None:
        self.request_id = opened.request_id
        self.handle = opened.handle
        self.gateway = opened.gateway
        self.scheduler = scheduler
        self.taken_from = ""  # the scheduler that had it last, and is not to go on
        self.asked = ""  # the scheduler that was asked to go on, while there is none
        self.resubmitted = False  # since it was opened: it may be opened again
        self.behind = False  # tokens were lost, and what comes does not fit until it is opened anew
        self.tenant, self.priority = opened.tenant, opened.priority
        self.cache_salt = opened.cache_salt
        self.params = params = opened.params
        self.prompt = opened.token_ids[: len(opened.token_ids) - opened.output_tokens]
        self.output = int32s()
        self.next_position = len(self.prompt)
        self.sent = 0
        self.finished: Finished | None = None
        self.teller = _teller(self, decoders)
        self._eos_token_ids = eos_token_ids
        self._name_of = decoders.token
        self._decoder: TokenDecoder = decoders.open(
            () if params.echo else self.prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._decoded = 0  # characters, also those behind a stop string
        self._embedding = b""
        self._stops: StopMatcher | None = None
        if params.stop:
            self._stops = StopMatcher(params.stop, include=params.include_stop_str_in_output)
        self._plain = _is_plain(params)

    def submission(self, detokenizer: str) -> Submit:
        """What a scheduler needs to go on from here; `detokenizer` is ours."""
        self.resubmitted = True
        return Submit(
            request_id=self.request_id,
            token_ids=self.prompt + self.output,
            params=self.params,
            route=Route(self.gateway, detokenizer),
            tenant=self.tenant,
            priority=self.priority,
            cache_salt=self.cache_salt,
            output_tokens=len(self.output),
        )

    def note(self, remark: Entry | Embedding) -> None:
        """Take what comes beside the tokens, before the token that it belongs to."""
        if isinstance(remark, Embedding):
            self._embedding = remark.vector
        elif self.teller is not None and remark.position <= self.next_position:
            self.teller.note(remark)

    def take(self, token_id: int, finish: int) -> str:
        """Add the token at `next_position`; returns the text that can be sent now.

        At the end, which is the executor's `finish`, a stop string or a loss, `finished` is set.
        """
        if self._plain and not finish:
            self.output.append(token_id)
            self.next_position += 1
            return self._decoder.push(token_id)
        return self._take_checked(token_id, finish)

    def _take_checked(self, token_id: int, finish: int) -> str:
        begins = self.next_position == len(self.prompt)
        self.next_position += 1
        if begins and self._lacks_logprobs():
            self.finished = self._failed(LOGPROBS_LOST)
            return ""
        prompt = self._begin() if begins else ""
        if self.params.hidden_tokens:
            stopped = finish in (FinishReason.NONE, FinishReason.STOP)
            self.finished = self._end(FinishReason.LENGTH if stopped else FinishReason(finish))
            return prompt + self._decoder.flush()
        self.output.append(token_id)
        return prompt + self._cut(self._decode(token_id, finish), token_id, finish)

    def _lacks_logprobs(self) -> bool:
        """A prompt's are not told in part: sums of them would be wrong without a sign."""
        if self.teller is None or self.params.prompt_logprobs is None:
            return False
        return not self.teller.knows(range(1, len(self.prompt)))

    def _begin(self) -> str:
        """The prompt's text if it is echoed; tells of its tokens if that is wanted.

        The decoder reads on, so that prompt and output are as the library decodes them together.
        """
        text, offsets = "", int32s(bytes(self.prompt.itemsize * len(self.prompt)))
        if self.params.echo:
            for place, token_id in enumerate(self.prompt):
                offsets[place] = len(text) + self._decoder.ahead(token_id)
                text += self._decoder.push(token_id)
        if self.teller is not None and self.teller.next_position == 0:
            self.teller.tell(self.prompt, offsets)
        self._decoded = len(text)
        return text

    def _decode(self, token_id: int, finish: int) -> str:
        """The text that became certain, stop strings included; tells of the token if wanted."""
        hidden = self._is_hidden(finish)
        text = self._decoder.flush() if hidden else ""
        if self.teller is not None:
            offset = self._decoded + len(text) + self._decoder.ahead(token_id)
            self.teller.tell(int32s([token_id]), int32s([offset]))
        if not hidden:
            text = self._decoder.push(token_id)
            if finish:
                text += self._decoder.flush()
        self._decoded += len(text)
        return text

    def _cut(self, text: str, token_id: int, finish: int) -> str:
        """What of it can be sent now; sets `finished` at the end."""
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

    def _end(self, reason: FinishReason, stop_reason: str | int | None = None) -> Finished:
        if self.params.embed and not self._embedding and reason is not FinishReason.ERROR:
            return self._failed(EMBEDDING_LOST)
        return Finished(
            self.request_id, reason, len(self.output), stop_reason, embedding=self._embedding
        )

    def _failed(self, failure: Failure) -> Finished:
        return Finished(self.request_id, FinishReason.ERROR, len(self.output), failure=failure)


def _teller(journal: Journal, decoders: Decoders) -> Teller | None:
    params = journal.params
    if not params.wants_tokens:
        return None
    with_prompt = params.return_token_ids or params.prompt_logprobs is not None
    position = 0 if with_prompt else len(journal.prompt)
    return Teller(journal.request_id, decoders.pieces, position)


def _is_plain(params: SamplingParams) -> bool:
    """Whether a token that is not the last needs only to be decoded."""
    return not (params.stop or params.wants_tokens or params.echo or params.hidden_tokens)

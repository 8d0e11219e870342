"""Questions to tokenizers: tokenize, detokenize. Each is asked again if its tokenizer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.gateway.errors import ApiError, of_failure, overloaded, unavailable
from services.gateway.flight import Link, new_request_id
from services.gateway.routing import Outstanding
from shared.messages import Abort, Decode, Decoded, Encode, Encoded, Refused
from shared.types import RequestId, ServiceName

ANSWER_SECONDS = 30.0
MAX_OPEN = 1024
ATTEMPTS = 3

Answer = TypeVar("Answer", Encoded, Decoded)


class _TokenizerLost(Exception):
    pass


class Questions:
    def __init__(self, link: Link, outstanding: Outstanding) -> None:
        self._link = link
        self._outstanding = outstanding
        self._open: dict[RequestId, tuple[str, asyncio.Future[Encoded | Decoded]]] = {}
        self._seen = False  # any tokenizer
        self._came = asyncio.Event()  # another one

    async def ask(
        self,
        question: Callable[[RequestId], Encode | Decode],
        answer: type[Answer],
        work: int,
    ) -> Answer:
        """The answer of the tokenizer with the least to do; raises ApiError."""
        if len(self._open) >= MAX_OPEN:
            raise overloaded("Too many texts wait for the tokenizer.")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                for _ in range(ATTEMPTS):
                    try:
                        found = await self._ask_one(question, work)
                    except _TokenizerLost:
                        continue
                    if isinstance(found, answer):
                        return found
        except TimeoutError:
            pass
        raise unavailable("No tokenizer answered.")

    def answered(self, message: Encoded | Decoded) -> None:
        _, future = self._open.get(message.request_id, ("", None))
        if future is not None and not future.done():
            future.set_result(message)

    def refused(self, message: Refused) -> bool:
        """Whether the refusal was of a question."""
        return self._fail(message.request_id, of_failure(message.failure))

    def joined(self, service: ServiceName) -> None:
        if service is ServiceName.TOKENIZER:
            self._seen = True
            self._came.set()

    def lost(self, tokenizer: str) -> None:
        for request_id, (name, _) in list(self._open.items()):
            if name == tokenizer:
                self._fail(request_id, _TokenizerLost())

    def _fail(self, request_id: RequestId, error: ApiError | _TokenizerLost) -> bool:
        if request_id not in self._open:
            return False
        _, future = self._open[request_id]
        if not future.done():
            future.set_exception(error)
        return True

    async def _ask_one(
        self, question: Callable[[RequestId], Encode | Decode], work: int
    ) -> Encoded | Decoded:
        tokenizer = await self._tokenizer()
        request_id = new_request_id()
        if not self._link.send(ServiceName.TOKENIZER, tokenizer, question(request_id)):
            raise _TokenizerLost
        future: asyncio.Future[Encoded | Decoded] = asyncio.get_running_loop().create_future()
        self._open[request_id] = (tokenizer, future)
        self._outstanding.add(tokenizer, work)
        try:
            return await future
        except asyncio.CancelledError:
            self._link.send(ServiceName.TOKENIZER, tokenizer, Abort(request_id, "client closed"))
            raise
        finally:
            del self._open[request_id]
            self._outstanding.done(tokenizer, work)

    async def _tokenizer(self) -> str:
        """The one with the least to do; if all were lost, the next that comes."""
        while True:
            tokenizer = self._outstanding.choose(self._link.peers(ServiceName.TOKENIZER))
            if tokenizer is not None:
                return tokenizer
            if not self._seen:
                raise unavailable("No tokenizer is connected.")
            self._came.clear()
            await self._came.wait()

"""A batch: lines in, results out, with a bounded number of requests under way."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.batch.client import Answer, Client
from services.batch.custom_ids import CustomIds, Place
from services.batch.failures import RequestFailed
from services.batch.lines import LONGEST_LINE
from services.batch.output import ID_PREFIX, Output
from services.batch.progress import Progress
from services.batch.requests import BadLine, Request, read_request


@dataclass(slots=True)
class Tally:
    """What became of the lines."""

    succeeded: int = 0
    failed: int = 0
    done_before: int = 0
    empty: int = 0


class Run:
    def __init__(self, client: Client, output: Output, ids: CustomIds, progress: Progress) -> None:
        self.tally = Tally()
        self._client = client
        self._output = output
        self._ids = ids
        self._progress = progress
        self._room = asyncio.Semaphore(client.window)

    async def run(self, lines: AsyncIterator[bytes | None]) -> None:
        """Read no more lines than there is room for; raises OutputError, ServerGone."""
        number = 0
        try:
            async with asyncio.TaskGroup() as group:
                async for line in lines:
                    number += 1
                    if (request := self._read(number, line)) is not None:
                        await self._room.acquire()
                        group.create_task(self._ask(number, request))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._progress.finish()

    def _read(self, number: int, line: bytes | None) -> Request | None:
        """None if there is nothing to ask for."""
        if line is not None and not line.strip():
            self.tally.empty += 1
            return None
        try:
            request = self._parse(line)
        except BadLine as bad:
            self._end(_new_identity(), number, bad.custom_id, None, bad.failure)
            return None
        if request is None:
            self.tally.done_before += 1
            self._progress.skip()
        return request

    def _parse(self, line: bytes | None) -> Request | None:
        """None if a former run has answered it; raises BadLine."""
        if line is None:
            message = f"the line is longer than {LONGEST_LINE} bytes"
            raise BadLine(RequestFailed(message, code="invalid_json_line"))
        request = read_request(line)
        match self._ids.take(request.custom_id):
            case Place.DONE:
                return None
            case Place.DUPLICATE:
                message = f"custom_id: {request.custom_id[:100]!r} is that of an earlier line"
                failure = RequestFailed(message, code="duplicate_custom_id", param="custom_id")
                raise BadLine(failure, request.custom_id)
        return request

    async def _ask(self, number: int, request: Request) -> None:
        identity = _new_identity()
        try:
            answer = await self._client.ask(request.url, request.body, identity)
            self._end(identity, number, request.custom_id, answer, answer.failure)
        except RequestFailed as failure:
            self._end(identity, number, request.custom_id, None, failure)
        finally:
            self._room.release()

    def _end(
        self,
        identity: str,
        number: int,
        custom_id: str | None,
        answer: Answer | None,
        failure: RequestFailed | None,
    ) -> None:
        self._output.write(identity, number, custom_id, answer, failure)
        if failure is None:
            self.tally.succeeded += 1
        else:
            self.tally.failed += 1
        self._progress.ended(answer)


def _new_identity() -> str:
    """The request's name in the output and in the server's log."""
    return ID_PREFIX + uuid.uuid4().hex

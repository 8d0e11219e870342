"""Requests that wait for a thread, within bounds, and those that are in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.tokenizer.processor import Question
from shared.messages import Decode, Generate
from shared.types import RequestId

MAX_REQUESTS = 4096
MAX_BYTES = 64 * 1024 * 1024
BATCH_REQUESTS = 64
BATCH_BYTES = 64 * 1024  # about 20 ms of work: nobody waits long behind a batch


@dataclass(frozen=True, slots=True)
class Job:
    """A question, and the gateway that waits for its answer."""

    question: Question
    gateway: str

    @property
    def request_id(self) -> RequestId:
        return self.question.request_id

    @property
    def size(self) -> int:
        """About its bytes."""
        if isinstance(self.question, Decode):
            return 4 * len(self.question.token_ids)
        prompt = self.question.prompt
        size = len(prompt.text or "") + len(prompt.chat or "") + 4 * len(prompt.token_ids or ())
        if isinstance(self.question, Generate) and self.question.params.grammar is not None:
            size += len(self.question.params.grammar.source)
        return size


class Backlog:
    """First come, first served; a job that was forgotten is never answered.

    A job is in `_waiting` from `add` to `take`, then in `_running` until `finish`.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Job] = {}
        self._running: dict[RequestId, Job] = {}
        self._bytes = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def empty(self) -> bool:
        return not self._waiting and not self._running

    def add(self, job: Job) -> bool:
        """False: there is no room."""
        full = self._waiting and self._bytes + job.size > MAX_BYTES
        if full or len(self._waiting) >= MAX_REQUESTS:
            return False
        self.forget(job.request_id)  # sent again
        self._waiting[job.request_id] = job
        self._bytes += job.size
        return True

    def take(self) -> list[Job]:
        """The next batch: small jobs together, a large one alone; [] if none waits."""
        batch: list[Job] = []
        size = 0
        for job in self._waiting.values():
            size += job.size
            if batch and (size > BATCH_BYTES or len(batch) == BATCH_REQUESTS):
                break
            batch.append(job)
        for job in batch:
            self._running[job.request_id] = self._drop_waiting(job.request_id)
        return batch

    def finish(self, job: Job) -> bool:
        """Whether the answer to this job is still wanted."""
        if self._running.get(job.request_id) is not job:
            return False
        del self._running[job.request_id]
        return True

    def forget(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)
        if request_id in self._waiting:
            self._drop_waiting(request_id)

    def forget_where(self, condition: Callable[[Job], bool]) -> None:
        jobs = [*self._waiting.values(), *self._running.values()]
        for job in filter(condition, jobs):
            self.forget(job.request_id)

    def _drop_waiting(self, request_id: RequestId) -> Job:
        job = self._waiting.pop(request_id)
        self._bytes -= job.size
        return job

"""The tokenizer's messages: prompts in, checked token ids out to a scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import Counter, Gauge

from services.tokenizer.backlog import MAX_REQUESTS, Backlog, Job
from services.tokenizer.encoder import Encoder
from services.tokenizer.grammars import Grammars
from services.tokenizer.processor import NO_TEMPLATE, Answer, InputProcessor
from shared.codec import Identity
from shared.mesh import Mesh
from shared.messages import (
    Abort,
    Credit,
    Decode,
    Encode,
    Failure,
    Generate,
    Message,
    Refused,
    Submit,
)
from shared.model import ModelInfo, read_model_info
from shared.schedulers import Schedulers
from shared.service import Service, StartError
from shared.settings import Settings, model_path
from shared.types import ServiceName

THREADS = 2  # so that a very long prompt does not hold up all others

FULL = Failure(503, "Too many requests wait to be tokenized.", code="service_unavailable")
SCHEDULER_SECONDS = 30.0  # how long requests wait for one
NO_SCHEDULER = Failure(503, "No scheduler is connected.", code="service_unavailable")


class TokenizerService(Service):
    """Stateless but for its backlog; all real work is done in threads."""

    service = ServiceName.TOKENIZER
    talks_to = frozenset({ServiceName.SCHEDULER, ServiceName.GATEWAY})

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        super().__init__(settings, mesh)
        self._path = model_path(settings)
        self._backlog = Backlog()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._schedulers = Schedulers()
        self._processor: InputProcessor | None = None  # None while it loads
        self._grammars: Grammars | None = None
        self._free_threads = THREADS
        self._unplaced: list[tuple[Job, Submit]] = []  # ready, but there is no scheduler
        self._patience: asyncio.TimerHandle | None = None  # runs while somebody is unplaced
        self._answered = Counter(
            "headrace_tokenizer_answers",
            "Requests that were tokenized, and those refused",
            ["kind"],
            registry=self.registry,
        )
        waiting = Gauge(
            "headrace_tokenizer_waiting", "Requests that wait for a thread", registry=self.registry
        )
        waiting.set_function(lambda: self._backlog.num_waiting)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        model, processor = await loop.run_in_executor(self._pool, self._load)
        self._processor, self._grammars = processor, Grammars(model)
        problem = processor.template_problem
        if problem is not None:
            level = self.log.info if problem == NO_TEMPLATE else self.log.warning
            level("no chats will be served", reason=problem)
        self._use_threads()

    def _load(self) -> tuple[ModelInfo, InputProcessor]:
        try:
            model = read_model_info(self._path, self.settings.max_model_len)
            return model, InputProcessor(model, Encoder(self._path))
        except ValueError as error:
            raise StartError(str(error)) from error

    async def stop(self) -> None:
        if self._grammars is not None:
            await self._grammars.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def load(self) -> Mapping[str, float]:
        return {"running": self._backlog.num_running, "waiting": self._backlog.num_waiting}

    @property
    def busy(self) -> bool:
        return not self._backlog.empty

    def handle(self, message: Message, sender: Identity) -> None:
        match message:
            case Generate():
                self._add(Job(message, message.route.gateway))
            case Encode() | Decode():
                self._add(Job(message, sender.name))
            case Credit():
                self._schedulers.credit(sender.name, message)
            case Abort():
                self._backlog.forget(message.request_id)

    def peer_joined(self, service: ServiceName, name: str) -> None:
        if service is ServiceName.SCHEDULER:
            self._place_all()

    def peer_lost(self, service: ServiceName, name: str) -> None:
        if service is ServiceName.SCHEDULER:
            self._schedulers.forget(name)
        elif service is ServiceName.GATEWAY:
            self._backlog.forget_where(lambda job: job.gateway == name)

    def _add(self, job: Job) -> None:
        if self._backlog.add(job):
            self._use_threads()
        else:
            self._refuse(job, FULL)

    def _use_threads(self) -> None:
        while self._processor is not None and self._free_threads:
            batch = self._backlog.take()
            if not batch:
                return
            self._free_threads -= 1
            self.spawn(self._process(self._processor, batch), name="tokenize")

    async def _process(self, processor: InputProcessor, batch: Sequence[Job]) -> None:
        questions = [job.question for job in batch]
        loop, began = asyncio.get_running_loop(), time.monotonic_ns()
        answers = await loop.run_in_executor(self._pool, processor.process, questions)
        self.trace.span("encode", began, rows=len(batch))
        self._free_threads += 1
        for job, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Submit) and answer.params.grammar is not None:
                self.spawn(self._check_grammar(job, answer), name="check grammar")
            else:
                self._send(job, answer)
        self._use_threads()

    async def _check_grammar(self, job: Job, request: Submit) -> None:
        """Then send it on; meanwhile those without a grammar go by."""
        assert self._grammars is not None
        self._send(job, await self._grammars.check(request))

    def _send(self, job: Job, answer: Answer) -> None:
        if isinstance(answer, Submit):
            self._place(job, answer)
        elif self._backlog.finish(job):
            if isinstance(answer, Refused):
                self._refuse(job, answer.failure)
            else:
                self.mesh.send(ServiceName.GATEWAY, job.gateway, answer)

    def _place(self, job: Job, request: Submit) -> None:
        """Send a request to a scheduler; without one, it waits for some time."""
        ids, salt = request.token_ids, request.cache_salt
        scheduler = self._schedulers.choose(self._candidates, ids, salt)
        if scheduler is None and len(self._unplaced) < MAX_REQUESTS:
            self._unplaced.append((job, request))
            if self._patience is None:
                loop = asyncio.get_running_loop()
                self._patience = loop.call_later(SCHEDULER_SECONDS, self._place_all)
        elif self._backlog.finish(job):
            if scheduler and self.mesh.send(ServiceName.SCHEDULER, scheduler, request):
                self._answered.labels("submitted").inc()
            else:
                self._refuse(job, NO_SCHEDULER)

    def _place_all(self) -> None:
        """There is a scheduler now, or none came in time."""
        unplaced, self._unplaced = self._unplaced, []
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        for job, request in unplaced:
            if self._candidates:
                self._place(job, request)
            elif self._backlog.finish(job):
                self._refuse(job, NO_SCHEDULER)

    @property
    def _candidates(self) -> list[str]:
        """Schedulers that take requests; the last one does even if it leaves.

        For the gateways send nothing more then: what comes was on its way.
        """
        service = ServiceName.SCHEDULER
        return self.mesh.peers(service) or self.mesh.present(service)

    def _refuse(self, job: Job, failure: Failure) -> None:
        self._answered.labels("refused").inc()
        self.mesh.send(ServiceName.GATEWAY, job.gateway, Refused(job.request_id, failure))

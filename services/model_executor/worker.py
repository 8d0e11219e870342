"""The compute thread: plans in, results out; the event loop and it never wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from services.model_executor.batch import PlanMisfit
from services.model_executor.results import StepOutput
from shared.messages import Announce, Plan
from shared.types import Incarnation

T = TypeVar("T")

MAX_PLANS = 8  # waiting; a scheduler plans one or two ahead


class Runner(Protocol):
    """What the thread drives."""

    @property
    def num_running(self) -> int: ...
    def announce(self) -> Announce: ...
    def execute(
        self, plan: Plan, epoch: Incarnation, iteration: int, arrived: float
    ) -> StepOutput: ...
    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A plan, and the link that it came over: with another link begins another batch."""

    link: int
    epoch: Incarnation
    plan: Plan
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Done:
    """A job's outcome; exactly one of output and misfit is set."""

    job: Job
    output: StepOutput | None = None
    misfit: str | None = None


class Worker:
    """Owns the thread in which the model is loaded and runs. Its callbacks run on the loop."""

    def __init__(
        self,
        load: Callable[[], Runner],
        on_done: Callable[[Done], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self.link = 0  # jobs of any other link are skipped
        self.num_running = 0  # sequences that have not finished
        self.iterations = 0  # done
        self.computing = False
        self._load = load
        self._on_done = on_done
        self._on_fault = on_fault
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_PLANS)
        self._closed = False
        self._batch_link: int | None = None  # that of the sequences in the batch
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Announce] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    @property
    def busy(self) -> bool:
        """Whether sequences of the present link have not finished."""
        return self._batch_link == self.link and self.num_running > 0

    async def start(self) -> Announce:
        """Load the model; raises what loading raises."""
        self._thread.start()
        return await self._loaded

    def submit(self, job: Job) -> bool:
        """Queue a job; False if too many wait."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """End the thread after what it computes now; does not wait for it."""
        self._closed = True
        with contextlib.suppress(queue.Full):  # full: it is not waiting, and will see the flag
            self._jobs.put_nowait(None)

    def _main(self) -> None:
        try:
            runner = self._load()
        except BaseException as error:
            self._tell(self._not_loaded, error)
            return
        self._tell(self._is_loaded, runner.announce())
        try:
            self._run(runner)
        except BaseException as error:
            self._tell(self._on_fault, error)

    def _run(self, runner: Runner) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            if job.link == self.link:
                self._compute(runner, job)

    def _compute(self, runner: Runner, job: Job) -> None:
        """Run a job's plan, and run it again while its lease lasts."""
        if job.link != self._batch_link:
            runner.reset()
            self._batch_link = job.link
        iteration = 0
        while self._execute(runner, job, iteration) and self._leased(job, iteration):
            iteration += 1

    def _execute(self, runner: Runner, job: Job, iteration: int) -> bool:
        """Run one iteration and hand its outcome over; False if its rows give no more tokens."""
        output, misfit = None, None
        self.computing = True
        try:
            output = runner.execute(job.plan, job.epoch, iteration, job.arrived)
        except PlanMisfit as error:
            runner.reset()
            misfit = str(error)
        self.computing = False
        self.iterations += 1
        self.num_running = runner.num_running
        self._tell(self._on_done, Done(job, output, misfit))
        return output is not None and output.decode_tokens > 0 and self.num_running > 0

    def _leased(self, job: Job, iteration: int) -> bool:
        """Whether the job's rows may be run once more: its lease lasts, and nothing newer came."""
        current = job.link == self.link and not self._closed
        return iteration < job.plan.lease and self._jobs.empty() and current

    def _tell(self, callback: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback, argument)

    def _is_loaded(self, capacity: Announce) -> None:
        if not self._loaded.cancelled():
            self._loaded.set_result(capacity)

    def _not_loaded(self, error: BaseException) -> None:
        if not self._loaded.cancelled():
            self._loaded.set_exception(error)

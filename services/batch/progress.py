"""How far a batch is: a bar of requests on standard error, and nothing anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from services.batch.client import Answer


class Progress:
    """A context manager; `shown` None is: if standard error is a terminal.

    Where it is shown without being on a terminal, only its end is written.
    """

    def __init__(self, total: int | None, shown: bool | None = None) -> None:
        terminal = sys.stderr.isatty()
        self._began = time.monotonic()
        self._tokens = self._failed = 0
        self._bar = RichProgress(
            TextColumn("requests"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True, force_terminal=terminal, soft_wrap=not terminal),
            redirect_stdout=False,  # which would send it to standard error
            disable=not (terminal if shown is None else shown),
        )
        self._task = self._bar.add_task(self._text(0, total), total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def skip(self) -> None:
        """A request that needs no answer any more."""
        self._advance()

    def ended(self, answer: Answer | None) -> None:
        """A request has its answer, or failed."""
        if answer is None or answer.failure:
            self._failed += 1
        else:
            usage = answer.body.get("usage")
            self._tokens += _completion_tokens(usage)
        self._advance()

    def finish(self) -> None:
        """There are no more requests."""
        done = int(self._state.completed)
        self._bar.update(self._task, total=done, description=self._text(done, done))

    def _advance(self) -> None:
        done, total = int(self._state.completed) + 1, self._state.total
        self._bar.update(self._task, completed=done, description=self._text(done, total))

    @property
    def _state(self) -> Task:
        return self._bar.tasks[0]

    def _text(self, done: int, total: float | None) -> str:
        share = "" if total is None else f"{100 * done // int(total) if total else 100}% "
        failed = f", {self._failed} failed" if self._failed else ""
        rate = self._tokens / max(time.monotonic() - self._began, 0.001)
        whole = "?" if total is None else int(total)
        return f"{share}{done}/{whole}{failed}, {rate:.0f} tokens/s"


def _completion_tokens(usage: Any) -> int:
    """Of all samples; embeddings have none."""
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0

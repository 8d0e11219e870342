"""The steps of a check: each is tried, timed and told; the end says whether all were right."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class CheckFailed(Exception):
    """What was to be shown is not so; the text says what was seen instead."""


@dataclass
class Checklist:
    title: str
    rows: list[tuple[bool, float, str, str]] = field(default_factory=list)
    console: Console = field(default_factory=lambda: Console(soft_wrap=True))

    def step(self, name: str, act: Callable[[], str]) -> bool:
        """Do it; `act` returns what was seen, or raises CheckFailed. False if it failed."""
        began = time.monotonic()
        self.console.print(f"... {name}", style="dim")
        try:
            good, seen = True, act()
        except CheckFailed as failure:
            good, seen = False, str(failure)
        seconds = time.monotonic() - began
        self.rows.append((good, seconds, name, seen))
        mark = "[green]ok[/]" if good else "[red]FAILED[/]"
        self.console.print(f"{mark} {name} ({seconds:.0f} s): {escape(seen)}")
        return good

    def report(self) -> int:
        """Print all outcomes; returns the exit code."""
        table = Table("outcome", "seconds", "step", "seen", title=self.title)
        for good, seconds, name, seen in self.rows:
            mark = "[green]ok[/]" if good else "[red]FAILED[/]"
            table.add_row(mark, f"{seconds:.0f}", name, escape(seen))
        self.console.print(table)
        return 0 if self.rows and all(good for good, *_ in self.rows) else 1


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Ask twice a second; raises CheckFailed if it has not come about in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise CheckFailed(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.5)

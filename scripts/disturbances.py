"""What befalls containers under load: they are killed, paused, added and removed.

Of none does any client see more than a pause, but those of a gateway that was killed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from checklist import CheckFailed
from containers import TOKENS, Containers
from load import QUESTIONS, Load, Outcome, Tally, ask

BEFORE, AFTER = 4.0, 8.0  # seconds of load around a disturbance
PAUSE = 40.0  # seconds; a link lives through 20 s without a heartbeat


class Disturbances:
    def __init__(self, containers: Containers, clients: int) -> None:
        self._clients = clients
        self._expected = containers.expected
        self._stack = containers.stack

    def kill(self, service: str) -> str:
        container = self._victim(service)
        with self._load() as tally:
            time.sleep(BEFORE)
            self._stack.kill(container)
            took = self._whole_again()
            time.sleep(AFTER)
        _right(tally, may_lose=service == "gateway")
        return f"whole again after {took:.0f} s; {tally}"

    def pause(self, service: str) -> str:
        """It hangs with all its threads: others go on without it, if there are any of its kind."""
        container = self._victim(service)
        alone = len(self._stack.containers(service)) == 1
        with self._load() as tally:
            time.sleep(BEFORE)
            before = sum(tally.counts.values())
            with self._stack.paused(container):
                time.sleep(PAUSE)
                meanwhile = sum(tally.counts.values()) - before
            took = self._whole_again()
            time.sleep(AFTER)
        _right(tally)
        if not meanwhile and not alone:
            raise CheckFailed(f"no answer in {PAUSE:.0f} s without it; {tally}")
        return f"{meanwhile} answers meanwhile, whole again after {took:.0f} s; {tally}"

    def rescale(self, **scale: int) -> str:
        with self._load() as tally:
            time.sleep(BEFORE)
            began = time.monotonic()
            self._stack.up(**scale)
            self._stack.wait_whole()
            took = time.monotonic() - began
            time.sleep(AFTER)
        _right(tally)
        return f"{dict(self._stack.instances())} after {took:.0f} s; {tally}"

    def remove_gateway(self) -> str:
        """The one that goes ends its answers first; a balancer has taken it off its list."""
        first, second = self._stack.gateways()
        answers: list[Outcome] = []
        question = QUESTIONS[0]
        client = Thread(target=lambda: answers.append(ask(second, question, 3 * TOKENS)))
        client.start()
        time.sleep(1.0)
        told = self.rescale(gateway=1)
        client.join()
        if answers[0].kind != "right":
            raise CheckFailed(f"the answer of the gateway that was removed: {answers[0]}")
        if self._stack.gateways() != [first]:
            raise CheckFailed(f"gateways are at {self._stack.gateways()}, not at {first}")
        return f"its answer came whole; {told}"

    def _victim(self, service: str) -> str:
        return random.choice(list(self._stack.containers(service).values()))

    def _whole_again(self) -> float:
        """Seconds until it is."""
        began = time.monotonic()
        self._stack.wait_whole()
        return time.monotonic() - began

    @contextmanager
    def _load(self) -> Iterator[Tally]:
        load = Load(self._stack.url, self._expected, self._clients, TOKENS)
        with load:
            yield load.tally


def _right(tally: Tally, *, may_lose: bool = False) -> None:
    allowed = {"right", "lost", "refused"} if may_lose else {"right"}
    if not tally.counts["right"] or set(tally.counts) - allowed:
        raise CheckFailed(str(tally))

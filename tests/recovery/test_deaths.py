"""Whatever dies whenever: each request says just what it would have said, and nothing stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from services.detokenizer import service as detokenizer_service
from services.detokenizer.decoder import Decoders
from services.gateway import flights
from shared.messages import Announce
from shared.model import read_model_info
from shared.settings import Settings
from shared.types import ServiceName
from tests.recovery.network import Network, network
from tests.recovery.nodes import (
    DETOKENIZER,
    EXECUTOR,
    GATEWAY,
    KINDS,
    SCHEDULER,
    TOKENIZER,
    DetokenizerNode,
    ExecutorNode,
    GatewayNode,
    SchedulerNode,
)
from tests.recovery.requests import Case, ask
from tests.services.scheduler.strict_executor import VOCAB_SIZE

MOST_DEATHS = {TOKENIZER: 2, SCHEDULER: 3, DETOKENIZER: 3, EXECUTOR: 2}  # fewer than are poison
PATIENCE = 20.0  # virtual seconds to the end, once all live: no grace may have to run out


class World:
    """A mesh under attack."""

    def __init__(self, mesh: Network, library: Tokenizer) -> None:
        self.mesh = mesh
        self.rng = mesh.rng
        self._library = library
        self.cases: list[Case] = []
        self.deaths = dict.fromkeys(MOST_DEATHS, 0)
        self.wanted = [(TOKENIZER, 0), (SCHEDULER, 0), (EXECUTOR, 0), (DETOKENIZER, 0)]
        for service, index in ((DETOKENIZER, 1), (SCHEDULER, 1), (EXECUTOR, 1), (EXECUTOR, 2)):
            if self.rng.random() < 0.5:
                self.wanted.append((service, index))
        if (SCHEDULER, 1) in self.wanted and self.only_executor:
            self.wanted.append((EXECUTOR, 1))  # without one, a scheduler waits for it
        mesh.start(GATEWAY)
        for service, index in self.wanted:
            mesh.start(service, index)

    @property
    def gateway(self) -> GatewayNode:
        node = self.mesh.nodes["gateway.0"]
        assert isinstance(node, GatewayNode)
        return node

    def ask(self, *, may_stop: bool = True) -> None:
        def asking() -> Case:
            return ask(self.rng, self.gateway.flights, self._library, may_stop=may_stop)

        self.cases.append(self.mesh.call(asking))

    def abort(self) -> None:
        going = [case for case in self.cases if not case.ended]
        if going:
            case = self.rng.choice(going)
            case.aborted = True
            self.mesh.call(lambda: self.gateway.flights.close(case.flight, "client closed"))

    def kill(self) -> None:
        if (name := self._victim()) is not None:
            self.mesh.kill(name)

    def withdraw(self) -> None:
        if (name := self._victim()) is not None:
            self.mesh.call(self.mesh.nodes[name].mesh.withdraw)

    def _victim(self) -> str | None:
        """One that may die, now or later."""
        names = [
            f"{service}.{index}"
            for service, index in self.wanted
            if f"{service}.{index}" in self.mesh.nodes
            and self.deaths[service] < MOST_DEATHS[service]
        ]
        if not names:
            return None
        name = self.rng.choice(names)
        self.deaths[ServiceName(name.rpartition(".")[0])] += 1
        return name

    def end(self) -> None:
        """One that leaves is gone, whether it was done or not."""
        if self._leaving:
            self.mesh.kill(self.rng.choice(self._leaving))

    @property
    def _leaving(self) -> list[str]:
        return [name for name, node in self.mesh.nodes.items() if node.mesh.leaving]

    def revive(self) -> None:
        dead = [one for one in self.wanted if f"{one[0]}.{one[1]}" not in self.mesh.nodes]
        if dead:
            self.mesh.start(*self.rng.choice(dead))

    def settle(self) -> None:
        """All live, and nothing more happens to them."""
        while self._leaving:
            self.end()
        for service, index in self.wanted:
            if f"{service}.{index}" not in self.mesh.nodes:
                self.mesh.start(service, index)
        limit = self.mesh.loop.now + PATIENCE
        for _ in range(100_000):
            if not self.mesh.step():
                if not len(self.gateway.flights) and self.at_rest:
                    return
                assert self.mesh.loop.now < limit, "somebody waits in vain"
                self.mesh.pass_time(0.5)
        raise AssertionError("it goes on for ever")

    @property
    def only_executor(self) -> bool:
        return sum(service is EXECUTOR for service, _ in self.wanted) == 1

    @property
    def at_rest(self) -> bool:
        return not any(
            node.service.busy
            for node in self.mesh.nodes.values()
            if isinstance(node, SchedulerNode | DetokenizerNode)
        )

    def check(self) -> None:
        for case in self.cases:
            if not case.aborted:
                case.check()
        for node in self.mesh.nodes.values():
            if isinstance(node, SchedulerNode):
                assert node.service._core.fleet.cache_usage == 0  # type: ignore[union-attr]
            elif isinstance(node, DetokenizerNode):
                assert node.service._core.num_orphans == 0  # type: ignore[union-attr]
            elif isinstance(node, ExecutorNode) and self.only_executor:
                # Of several, some get no further plan, and so do not hear who left.
                assert all(one.finished for one in node.executor.slots.values())


@pytest.fixture(scope="module")
def library(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture
def make_settings(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[random.Random], Settings]:
    monkeypatch.setattr(flights, "MAX_TOKENIZERS_LOST", 100)  # nothing here is poison
    for reader in (Decoders, read_model_info):  # each life of a detokenizer would read the same
        monkeypatch.setattr(detokenizer_service, reader.__name__, cache(reader))
    return lambda rng: Settings(
        model=str(model_dir),
        run_ahead=rng.randint(0, 2),
        max_lease=rng.choice([0, 3, 16]),
        max_queue=64,
    )


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_deaths(
    make_settings: Callable[[random.Random], Settings], library: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    capacity = Announce(
        fingerprint="model",
        num_blocks=rng.randint(14, 40),
        block_size=rng.choice([4, 8]),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(4, 24),
        max_model_len=48,
        vocab_size=VOCAB_SIZE,
    )
    with capture_logs(), network(KINDS, rng, make_settings(rng), capacity) as mesh:
        world = World(mesh, library)
        acts = [world.ask] * 3 + [world.kill] * 2 + [world.revive] * 2 + [world.abort]
        acts += [world.withdraw, world.end]
        for _ in range(rng.randint(1, 30)):
            rng.choice(acts)()
            for _ in range(rng.choice([0, 3, 30, 100])):
                mesh.step()
        world.settle()
        world.ask(may_stop=False)  # with whose plan the executor hears of those that have left
        world.settle()
        world.check()

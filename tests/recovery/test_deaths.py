"""Whatever dies whenever: each request says just what it would have said, and nothing stays."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from services.detokenizer import service as detokenizer_service
from services.detokenizer.decoder import Decoders
from services.gateway import flights
from services.gateway.flight import Flight
from services.gateway.request import GenerationRequest
from services.gateway.tokens import read_tokens
from shared.messages import Prompt
from shared.sampling import SamplingParams
from shared.settings import Settings
from shared.types import FinishReason, ServiceName, int32s
from tests.recovery.simulation import (
    DETOKENIZER,
    EXECUTOR,
    GATEWAY,
    SCHEDULER,
    TOKENIZER,
    DetokenizerNode,
    ExecutorNode,
    GatewayNode,
    Network,
    SchedulerNode,
    network,
)
from tests.services.scheduler.strict_executor import finish_of, token_of

MOST_DEATHS = {TOKENIZER: 2, SCHEDULER: 3, DETOKENIZER: 3, EXECUTOR: 2}  # fewer than are poison
PATIENCE = 20.0  # virtual seconds to the end, once all live: no grace may have to run out


@dataclass
class Case:
    """A request, and what it must say."""

    request: GenerationRequest
    flight: Flight
    text: str
    reason: FinishReason
    tokens: list[int]
    aborted: bool = False

    def check(self) -> None:
        collector = self.flight.collector
        assert collector.failure is None
        (choice,) = collector.choices
        assert choice.finished is not None
        assert "".join(choice.waiting) == self.text
        assert choice.finished.reason is self.reason
        assert choice.finished.completion_tokens == len(self.tokens)
        assert choice.prompt_tokens == len(self.request.prompts[0].token_ids or ())
        if self.request.params.return_token_ids:
            told = read_tokens(choice.waiting_spans)
            places = [token.position for token in told]
            assert places == list(range(choice.prompt_tokens + len(self.tokens)))
            assert [token.id for token in told[choice.prompt_tokens :]] == self.tokens


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
        mesh.start(GATEWAY)
        for service, index in self.wanted:
            mesh.start(service, index)

    @property
    def gateway(self) -> GatewayNode:
        node = self.mesh.nodes["gateway.0"]
        assert isinstance(node, GatewayNode)
        return node

    def ask(self, *, may_stop: bool = True) -> None:
        rng = self.rng
        first = rng.choice([0, 0, 100])  # few beginnings, so that many are found in the cache
        prompt = int32s(range(first, first + rng.randint(1, 12)))
        params = SamplingParams(
            seed=rng.randint(0, 1000),
            max_tokens=rng.randint(0, 24),
            ignore_eos=rng.random() < 0.5,
            return_token_ids=rng.random() < 0.3,
        )
        tokens, reason = undisturbed(params, len(prompt))
        text = self._library.decode(tokens[:-1] if reason is FinishReason.STOP else tokens)
        if len(text) > 8 and rng.random() < 0.3 and may_stop:
            params, tokens, text = self._with_stop(params, tokens, text)
            reason = FinishReason.STOP
        request = GenerationRequest("m", [Prompt(token_ids=prompt)], 1, params, stream=True)
        flight = self.mesh.call(lambda: self.gateway.flights.start(request, time.perf_counter()))
        self.cases.append(Case(request, flight, text, reason, tokens))

    def _with_stop(
        self, params: SamplingParams, tokens: list[int], text: str
    ) -> tuple[SamplingParams, list[int], str]:
        begin = self.rng.randint(2, len(text) - 3)
        stop = text[begin : begin + 3]
        needed = next(
            count
            for count in range(1, len(tokens) + 1)
            if stop in self._library.decode(tokens[:count])
        )
        return replace(params, stop=[stop]), tokens[:needed], text[: text.index(stop)]

    def abort(self) -> None:
        going = [one for one in self.cases if not one.flight.collector.choices[0].finished]
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


def undisturbed(params: SamplingParams, prompt: int) -> tuple[list[int], FinishReason]:
    """The tokens that count, and what ends them."""
    tokens: list[int] = []
    while True:
        position = prompt + len(tokens)
        finish = finish_of(params, prompt, position)
        if params.hidden_tokens:
            return [], finish
        tokens.append(token_of(params, position))
        if finish:
            return tokens, finish


@pytest.fixture(scope="module")
def library(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture
def make_settings(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[random.Random], Settings]:
    decoders = Decoders(model_dir)  # read once: each life of a detokenizer would read the same
    monkeypatch.setattr(flights, "MAX_LAUNCHES", 100)  # nothing here is poison
    monkeypatch.setattr(detokenizer_service, "Decoders", lambda path: decoders)
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
    sizes = {
        "num_blocks": rng.randint(14, 40),
        "block_size": rng.choice([4, 8]),
        "max_num_seqs": rng.randint(1, 5),
        "max_num_batched_tokens": rng.randint(4, 24),
        "max_model_len": 48,
    }
    with capture_logs(), network(rng, make_settings(rng), **sizes) as mesh:
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

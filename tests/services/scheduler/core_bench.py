"""A scheduler core on a bench: requests in, a strict executor behind it, what comes of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from services.scheduler.core import SchedulerCore
from services.scheduler.sequence import Sequence
from shared.messages import Announce, Failure, Plan, Route, StepResult, Submit
from shared.sampling import Grammar, GrammarKind, SamplingParams
from shared.types import RequestId, int32s
from tests.services.scheduler.strict_executor import VOCAB_SIZE, StrictExecutor, finish_of, token_of

ROUTE = Route("gateway.0", "detokenizer.0")
NAME = "model-executor.0"
CAPACITY = Announce(
    fingerprint="model",
    num_blocks=64,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=200,
    vocab_size=VOCAB_SIZE,
    session=3,
)

options = st.fixed_dictionaries(
    {
        "ignore_eos": st.booleans(),
        "first": st.sampled_from([0, 0, 100]),  # few prompts, so that many begin alike
        "tenant": st.sampled_from(["", "a", "b"]),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from(["", "", "salt"]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "jumps": st.booleans(),
    }
)


def submit(
    name: str,
    prompt: int = 5,
    max_tokens: int | None = 8,
    *,
    seed: int = 0,
    ignore_eos: bool = True,
    route: Route = ROUTE,
    first: int = 0,
    tenant: str = "",
    priority: int = 0,
    cache_salt: str = "",
    prompt_logprobs: int | None = None,
    jumps: bool = False,
) -> Submit:
    """Its prompt is `first`, `first` + 1, ...; of equal `first`, one begins with the other."""
    params = SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        prompt_logprobs=prompt_logprobs,
        grammar=Grammar(GrammarKind.REGEX, ".*") if jumps else None,
    )
    ids = int32s(range(first, first + prompt))
    return Submit(RequestId(name), ids, params, route, tenant, priority, cache_salt)


def open_all(core: SchedulerCore) -> None:
    """Tell its detokenizer of each sequence that it was not told of."""
    for sequence in list(core.unopened.values()):
        sequence.assign(sequence.route.detokenizer)
        core.opened(sequence)


def resubmission(sequence: Sequence, tokens: int | None = None) -> Submit:
    """What a detokenizer says that has so many of a sequence's tokens; None: all."""
    ids = sequence.token_ids[:tokens]
    return Submit(
        sequence.request_id,
        ids,
        sequence.asked,
        sequence.route,
        sequence.tenant,
        sequence.priority,
        sequence.cache_salt,
        output_tokens=len(ids) - sequence.num_prompt,
    )


def ran(request: Submit, generated: int) -> Submit:
    """The same request when so many of its tokens are there."""
    begin = len(request.token_ids)
    tokens = [token_of(request.params, begin + place) for place in range(generated)]
    return replace(request, token_ids=request.token_ids + int32s(tokens), output_tokens=generated)


def answer_recall(core: SchedulerCore) -> None:
    """As detokenizers that know just what the scheduler knows."""
    sequences = [one for one in core._known.values() if one.recall == core.recalls]
    for sequence in sequences:
        assert core.submit(resubmission(sequence)) is None
    for detokenizer in {sequence.route.detokenizer for sequence in sequences}:
        core.recalled(core.recalls, detokenizer)


def next_plan(core: SchedulerCore) -> Plan | None:
    """For the only executor."""
    plans = core.plan()
    assert len(plans) <= 1
    return plans[0][1] if plans else None


class Bench:
    """One iteration at a time; notes the requests that ended, in order."""

    def __init__(
        self, max_queue: int = 100, *, prefix_caching: bool = True, **capacity: int | str
    ) -> None:
        self.capacity = replace(CAPACITY, **capacity)  # type: ignore[arg-type]
        self.core = SchedulerCore(max_queue, clock=lambda: 0.0, prefix_caching=prefix_caching)
        self.executor = StrictExecutor(self.capacity)
        self.accepted: dict[str, Sequence] = {}
        self.ended: list[str] = []
        self.plans: list[Plan] = []
        assert self.core.connect(NAME, self.capacity) == []

    def submit(self, name: str, *args: int | None, **options: object) -> Sequence:
        """Submit what must be accepted."""
        sequence = self.core.submit(submit(name, *args, **options))  # type: ignore[arg-type]
        assert isinstance(sequence, Sequence), sequence
        self.accepted[name] = sequence
        open_all(self.core)
        return sequence

    def refuse(self, name: str, *args: int | None) -> Failure:
        """Submit what must be refused."""
        failure = self.core.submit(submit(name, *args))  # type: ignore[arg-type]
        assert isinstance(failure, Failure), failure
        return failure

    def plan(self) -> StepResult:
        """A plan, run; its result is still to be applied."""
        open_all(self.core)
        plan = next_plan(self.core)
        assert plan is not None
        self.plans.append(plan)
        return self.executor.execute(plan)

    def apply(self, result: StepResult) -> None:
        names = {int(sequence.handle): name for name, sequence in self.accepted.items()}
        self.core.apply(NAME, result)
        for handle, finish in zip(result.handles, result.finishes, strict=True):
            if finish and handle in names:
                self.ended.append(names[handle])

    def step(self) -> Plan:
        self.apply(self.plan())
        return self.plans[-1]

    def run(self, limit: int = 10_000) -> int:
        """Iterate until nothing is left to do; returns the number of iterations."""
        for iteration in range(limit):
            if not self.core.num_requests:
                return iteration
            self.step()
        raise AssertionError(f"{self.core.num_requests} requests left after {limit} iterations")

    def disconnect(self) -> list[Sequence]:
        """Lose the executor; the detokenizer has the tokens that the scheduler has."""
        poisonous = self.core.disconnect(NAME)
        answer_recall(self.core)
        return poisonous

    def reconnect(self, **capacity: int | str) -> list[tuple[Sequence, Failure]]:
        self.capacity = replace(self.capacity, **capacity)  # type: ignore[arg-type]
        self.executor = StrictExecutor(self.capacity)
        return self.core.connect(NAME, self.capacity)

    @property
    def running(self) -> list[str]:
        """Names of those in the executor's batch, oldest first."""
        return [
            name
            for name, sequence in sorted(self.accepted.items(), key=lambda item: item[1].handle)
            if sequence.running
        ]


def assert_idle(core: SchedulerCore) -> None:
    """All that was held is given back."""
    assert (core.num_requests, core.fleet.num_running, len(core.waiting)) == (0, 0, 0)
    assert core.fleet.cache_usage == 0
    assert core.plan() == []


def assert_complete(sequence: Sequence) -> None:
    """All its tokens are there, in order, and it ended where it had to."""
    params, prompt, tokens = sequence.params, sequence.num_prompt, sequence.token_ids
    last = len(tokens) - 1
    assert finish_of(params, prompt, last)
    assert not any(finish_of(params, prompt, position) for position in range(prompt, last))
    assert list(tokens[prompt:]) == [token_of(params, p) for p in range(prompt, last + 1)]

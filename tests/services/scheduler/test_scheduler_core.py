"""Requests and executors: who is taken, who is refused, and what survives whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core import MAX_EXECUTOR_DEATHS, SchedulerCore
from services.scheduler.sequence import Sequence
from shared.messages import Failure, Route
from shared.tombstones import LIMIT
from shared.types import RequestId, int32s
from tests.services.scheduler.core_bench import (
    CAPACITY,
    NAME,
    Bench,
    assert_complete,
    assert_idle,
    submit,
)


def test_requests_wait_for_an_executor_and_are_held_to_its_room_then() -> None:
    core = SchedulerCore(1, clock=lambda: 0.0, max_num_seqs=2)
    assert (core.fleet.max_num_seqs, core.max_queue, len(core.fleet)) == (0, 0, 0)
    waiting = [core.submit(submit(name, 5, None)) for name in "ab"]
    long = core.submit(submit("long", 300))
    full = core.submit(submit("c"))
    assert isinstance(full, Failure) and full.status == 429
    assert core.plan() == []
    ((misfit, failure),) = core.connect(NAME, CAPACITY)
    assert (misfit, failure.status) == (long, 400)
    assert (core.fleet.max_num_seqs, core.max_queue, len(core.fleet)) == (4, 1, 1)
    for sequence in waiting:
        assert isinstance(sequence, Sequence) and sequence.max_tokens == 195


def test_a_request_beyond_the_whole_cache_is_refused_and_blocks_nobody() -> None:
    for order in ("long first", "short first"):
        bench = Bench(num_blocks=16, block_size=16, max_model_len=1024)
        if order == "short first":
            bench.submit("short", 5, 5)
        failure = bench.refuse("long", 400, 10)
        assert (failure.status, failure.code) == (400, "context_length_exceeded")
        assert "256" in failure.message and "410" in failure.message
        assert bench.refuse("grows beyond", 200, 200).status == 400
        if order == "long first":
            bench.submit("short", 5, 5)
        bench.run()
        assert bench.ended == ["short"]


@pytest.mark.parametrize("prompt", [1, 200, 256])
def test_a_request_without_max_tokens_gets_what_the_cache_holds(prompt: int) -> None:
    bench = Bench(num_blocks=16, block_size=16, max_model_len=1024, max_num_batched_tokens=64)
    sequence = bench.submit("a", prompt, None)
    bench.run()
    assert len(sequence.token_ids) == 257  # of the last token the KV is never stored
    assert bench.ended == ["a"]
    assert bench.refuse("b", 257, None).status == 400


def test_the_context_bounds_a_request_too() -> None:
    bench = Bench(max_model_len=100)
    assert bench.submit("a", 60, None).max_tokens == 40
    assert bench.submit("b", 60, 40).max_tokens == 40
    assert bench.refuse("c", 60, 41).status == 400
    assert bench.refuse("d", 100, None).status == 400


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 5), (0, None), (0, 0), (5, -3)])
def test_a_request_with_nothing_to_do_is_refused(prompt: int, max_tokens: int | None) -> None:
    bench = Bench()
    assert bench.refuse("a", prompt, max_tokens).status == 400
    bench.submit("b")
    bench.run()


@pytest.mark.parametrize("prompt", [1, 5, 64])
def test_a_prompt_alone_may_fill_the_context(prompt: int) -> None:
    bench = Bench(num_blocks=16, max_model_len=64)
    sequence = bench.submit("a", prompt, 0)
    bench.run()
    assert bench.ended == ["a"]
    assert bench.executor.computed == prompt
    assert len(sequence.token_ids) == prompt + 1  # the one that ended it
    counters = bench.core.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (prompt, 0)
    assert bench.refuse("b", 65, 0).status == 400
    assert_idle(bench.core)


def test_a_prompt_alone_must_fit_into_the_cache() -> None:
    bench = Bench(num_blocks=4, max_model_len=64)
    bench.submit("a", 16, 0)
    bench.run()
    assert "16" in bench.refuse("b", 17, 0).message
    assert bench.submit("c", 16, 1).max_tokens == 1


@pytest.mark.parametrize("bad", [-1, CAPACITY.vocab_size])
def test_a_token_id_outside_the_vocabulary_never_reaches_the_executor(bad: int) -> None:
    bench = Bench()
    request = replace(submit("a"), token_ids=int32s([1, bad, 2]))
    failure = bench.core.submit(request)
    assert isinstance(failure, Failure) and failure.status == 400
    bench.submit("the largest", 1, first=CAPACITY.vocab_size - 1)
    bench.run()


def test_a_full_cache_ends_all_in_the_end_with_the_same_tokens() -> None:
    """R047"""
    bench = Bench(num_blocks=24, block_size=4, max_num_seqs=12)
    sequences = [bench.submit(f"r{n}", 8, 24, seed=n) for n in range(12)]  # cache for 3
    iterations = bench.run()
    for sequence in sequences:
        assert_complete(sequence)
    assert 0 < bench.core.counters.preemptions < 3 * 12
    assert iterations < 12 * 32
    assert_idle(bench.core)


def test_a_burst_of_prompts_with_a_cache_for_one_gets_on_in_every_iteration() -> None:
    """R073: no prompt holds blocks that another one waits for, and waits itself."""
    bench = Bench(num_blocks=8, block_size=16, max_num_seqs=16, max_num_batched_tokens=64)
    sequences = [bench.submit(f"r{n}", 100, 4, seed=n) for n in range(16)]
    while bench.core.num_requests:
        assert bench.step().row_slots
    for sequence in sequences:
        assert_complete(sequence)
    assert_idle(bench.core)


def test_preemption_does_not_turn_in_circles() -> None:
    """R049"""
    bench = Bench(num_blocks=20, block_size=4, max_num_seqs=6)
    for number in range(6):
        bench.submit(f"r{number}", 4, 28)  # 8 blocks each: cache for 2.5
    while bench.core.num_requests:
        before = bench.core.counters.preemptions
        oldest = min(s.handle for s in bench.accepted.values() if s.running or s in _waiting(bench))
        plan = bench.step()
        assert bench.core.counters.preemptions - before <= 1  # one for each lack of a block
        handles = {o.entered.handle for o in bench.executor.slots.values()}
        assert plan.row_slots and oldest in handles  # the oldest always gets on
    assert bench.core.counters.preemptions < 3 * 6
    assert len(bench.ended) == 6


def _waiting(bench: Bench) -> list[object]:
    return [s for s in bench.accepted.values() if s.request_id not in bench.ended]


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=20),
    block_size=st.sampled_from([1, 2, 4, 16]),
    spare=st.integers(0, 60),
    slots=st.integers(1, 20),
    budget=st.integers(1, 64),
    alike=st.booleans(),
)
def test_a_cache_that_holds_the_largest_request_alone_suffices_for_all(
    requests: list[tuple[int, int]],
    block_size: int,
    spare: int,
    slots: int,
    budget: int,
    alike: bool,
) -> None:
    largest = max(-(-(prompt + tokens - 1) // block_size) for prompt, tokens in requests)
    bench = Bench(
        num_blocks=largest + spare,
        block_size=block_size,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
    )
    sequences = [
        bench.submit(f"r{n}", *request, first=0 if alike else 50 * n)
        for n, request in enumerate(requests)
    ]
    bench.run()
    for sequence in sequences:
        assert_complete(sequence)
    if not alike:  # a victim that shares gives up little, and is computed again as quickly
        assert bench.core.counters.preemptions < 3 * len(requests)
    assert_idle(bench.core)


def test_a_burst_of_long_prompts_is_answered_one_after_the_other() -> None:
    bench = Bench(num_blocks=8, block_size=16, max_num_batched_tokens=64, max_num_seqs=16)
    for number in range(16):
        bench.submit(f"r{number}", 100, 10)
    bench.run(limit=16 * 12)  # two chunks and nine decodes each: never a plan without progress
    assert bench.ended == [f"r{number}" for number in range(16)]
    assert bench.core.counters.preemptions == 0


def test_the_queue_is_bounded() -> None:
    bench = Bench(max_queue=4, max_num_seqs=1)
    outcomes = [bench.core.submit(submit(f"r{number}")) for number in range(20)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert outcomes.index(refused[0]) == 5 and len(refused) == 15
    assert {(failure.status, failure.code) for failure in refused} == {(429, "rate_limit_exceeded")}
    assert len(bench.core.waiting) == 5
    while bench.core.num_requests == 5:
        bench.step()
    bench.submit("there is room again")
    assert bench.refuse("and no more").status == 429


def test_a_queue_of_none_takes_what_runs() -> None:
    bench = Bench(max_queue=0, max_num_seqs=2)
    bench.submit("a")
    bench.submit("b")
    assert bench.refuse("c").status == 429


def test_a_repeated_request_is_taken_once() -> None:
    bench = Bench()
    bench.submit("a")
    assert bench.core.submit(submit("a")) is None
    bench.step()
    assert bench.core.submit(submit("a")) is None
    assert bench.core.num_requests == 1


def test_an_abort_may_come_before_its_request_and_twice() -> None:
    bench = Bench()
    for _ in range(2):
        assert bench.core.abort(RequestId("early")) is None
    assert bench.core.submit(submit("early")) is None
    bench.submit("early")  # the abort was for one
    assert bench.core.abort(RequestId("early")) is not None
    assert bench.core.abort(RequestId("early")) is None
    assert_idle(bench.core)


def test_aborts_of_the_unknown_are_not_remembered_without_bound() -> None:
    bench = Bench()
    for number in range(LIMIT + 1):
        bench.core.abort(RequestId(f"u{number}"))
    bench.submit("u0")  # the oldest was forgotten
    assert bench.core.submit(submit("u1")) is None


def test_tokens_of_an_aborted_request_are_late() -> None:
    bench = Bench()
    bench.submit("a")
    other = bench.submit("b")
    result = bench.plan()
    bench.core.abort(RequestId("a"))
    bench.apply(result)
    assert bench.core.counters.late_tokens == 1
    assert len(other.token_ids) == 6
    bench.run()
    assert bench.core.counters.generation_tokens == 8


def test_all_requests_of_a_gateway_can_be_aborted() -> None:
    bench = Bench(max_num_seqs=1)
    there, here = Route("gateway.1", "detokenizer.0"), Route("gateway.0", "detokenizer.0")
    for number in range(6):
        bench.submit(f"r{number}", route=there if number % 2 else here)
    bench.step()
    dropped = bench.core.abort_where(lambda sequence: sequence.route == there)
    assert [sequence.request_id for sequence in dropped] == ["r1", "r3", "r5"]
    bench.run()
    assert bench.ended == ["r0", "r2", "r4"]


def test_what_ran_is_computed_again_by_the_next_executor_before_what_waited() -> None:
    bench = Bench(max_num_seqs=2)
    sequences = [bench.submit(name, 5, 8) for name in "abcd"]
    for _ in range(4):
        bench.step()
    assert bench.disconnect() == []
    assert bench.core.plan() == []
    assert (bench.core.fleet.num_running, bench.core.num_requests) == (0, 4)
    assert bench.reconnect() == []
    result = bench.plan()
    assert [list(entering.token_ids) for entering in bench.plans[-1].entering] == [
        list(sequence.token_ids) for sequence in sequences[:2]
    ]
    assert [len(sequence.token_ids) for sequence in sequences] == [9, 9, 5, 5]
    bench.apply(result)
    bench.run()
    assert bench.ended == list("abcd")
    for sequence in sequences:
        assert_complete(sequence)
    assert bench.disconnect() == []
    assert bench.disconnect() == []  # there is none


def test_results_of_a_former_session_are_late_even_from_the_same_executor() -> None:
    bench = Bench()
    sequence = bench.submit("a")
    former = bench.plan()
    bench.disconnect()
    bench.reconnect()
    result = bench.plan()
    bench.core.apply(NAME, former)
    assert len(sequence.token_ids) == 5
    bench.apply(result)
    bench.core.apply(NAME, result)  # and one that comes twice
    assert len(sequence.token_ids) == 6
    assert bench.core.counters.late_tokens == 2
    bench.run()
    assert_complete(sequence)


def test_results_without_a_plan_change_nothing() -> None:
    bench = Bench()
    sequence = bench.submit("a")
    result = bench.plan()
    bench.core.apply(NAME, replace(result, step=result.step + 1))
    bench.core.apply(NAME, replace(result, step=result.step - 1))
    assert len(sequence.token_ids) == 5
    bench.apply(result)
    assert len(sequence.token_ids) == 6


def test_a_request_that_ran_in_three_deaths_is_poison() -> None:
    bench = Bench(max_num_seqs=1)
    poison, innocent = bench.submit("poison"), bench.submit("innocent")
    for death in range(1, MAX_EXECUTOR_DEATHS + 1):
        bench.step()
        assert bench.disconnect() == ([poison] if death == MAX_EXECUTOR_DEATHS else [])
        bench.reconnect()
    assert innocent.executor_deaths == 0
    bench.run()
    assert bench.ended == ["innocent"]
    assert_idle(bench.core)


def test_an_executor_of_another_model_is_refused_by_both_names() -> None:
    bench = Bench()
    bench.submit("a")
    bench.disconnect()
    with pytest.raises(ValueError, match=r"other.*model"):
        bench.reconnect(fingerprint="other")
    assert not bench.core.fleet
    bench.reconnect(fingerprint="model")
    bench.run()


def test_a_smaller_executor_ends_what_it_cannot_hold_and_shortens_the_open_ended() -> None:
    bench = Bench(num_blocks=64, block_size=4)
    small, large = bench.submit("small", 5, 10), bench.submit("large", 100, 50)
    open_ended, grown = bench.submit("open", 10, None), bench.submit("grown", 10, None)
    assert open_ended.max_tokens == 190
    for _ in range(20):
        bench.step()
    bench.core.abort(RequestId("grown"))
    bench.disconnect()
    ((misfit, failure),) = bench.reconnect(num_blocks=20)
    assert (misfit, failure.status) == (large, 400)
    assert "80" in failure.message
    assert (small.max_tokens, open_ended.max_tokens) == (10, 71)
    bench.run()
    assert len(open_ended.token_ids) == 81
    assert not grown.running


def test_an_open_ended_request_that_outgrew_the_next_executor_is_ended() -> None:
    bench = Bench()
    sequence = bench.submit("a", 10, None)
    while len(sequence.token_ids) < 41:
        bench.step()
    bench.disconnect()
    ((misfit, failure),) = bench.reconnect(num_blocks=10)
    assert misfit is sequence and "42" in failure.message
    assert_idle(bench.core)


def test_counters_add_up() -> None:
    bench = Bench(num_blocks=16)
    for number in range(6):
        bench.submit(f"r{number}", 10, 20)
    for _ in range(10):
        bench.step()
    bench.disconnect()
    bench.reconnect()
    bench.run()
    counters = bench.core.counters
    assert counters.prompt_tokens == 60  # each prompt once, however often it was computed
    assert counters.generation_tokens == 120
    assert counters.preemptions > 0


def test_a_request_keeps_no_hold_on_its_submit() -> None:
    bench = Bench()
    request = submit("a")
    bench.core.submit(request)
    bench.run()
    assert request.token_ids == int32s(range(5))


def test_what_a_grammar_forces_takes_no_iterations_of_its_own() -> None:
    def alone(jumps: bool) -> tuple[int, list[int]]:
        bench = Bench()
        sequence = bench.submit("a", 5, 60, jumps=jumps)
        iterations = bench.run()
        assert_idle(bench.core)
        assert bench.core.counters.generation_tokens == 60
        return iterations, sequence.token_ids.tolist()

    (few, tokens), (many, same) = alone(jumps=True), alone(jumps=False)
    assert (tokens, many) == (same, 60)
    assert few < 30


def test_nobody_gives_way_to_a_jump() -> None:
    """With no block to spare there is none, and one by one all tokens come."""
    bench = Bench(num_blocks=16, max_num_seqs=2)
    for name in ("a", "b"):
        bench.submit(name, 4, 28, jumps=True)
    assert bench.run() == 28
    assert bench.core.counters.preemptions == 0

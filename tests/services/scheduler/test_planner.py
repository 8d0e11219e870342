"""What one plan holds: budget, chunks, blocks, slots, order, and who gives way."""

from __future__ import annotations

import pytest

from shared.messages import NEWEST, Plan
from shared.types import FinishReason
from tests.services.scheduler.core_bench import Bench, assert_complete, assert_idle


def rows(plan: Plan) -> list[tuple[int, int, int]]:
    """(slot, start, tokens) of each row."""
    return list(zip(plan.row_slots, plan.row_starts, plan.row_tokens, strict=True))


def test_a_prompt_is_computed_at_once_and_then_a_token_a_plan() -> None:
    bench = Bench()
    sequence = bench.submit("a", 5, 3)
    first, second, third = (bench.step() for _ in range(3))
    slot = first.entering[0].slot
    assert first.entering[0].prompt_tokens == 5
    assert [rows(plan) for plan in (first, second, third)] == [
        [(slot, 0, 5)],
        [(slot, NEWEST, 1)],
        [(slot, NEWEST, 1)],
    ]
    assert_complete(sequence)
    assert_idle(bench.core)


def test_plans_are_differences() -> None:
    bench = Bench(block_size=8)
    for name in "abc":
        bench.submit(name, 4, 20)
    bench.step()
    plan = bench.step()
    assert len(plan.row_slots) == 3
    assert not plan.entering and not plan.retired and not plan.block_ids


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    bench = Bench(max_num_batched_tokens=8)
    short, long = bench.submit("short", 2, 40), None
    bench.step()
    long = bench.submit("long", 20, 4)
    chunks = []
    while long.num_computed < 20:
        plan = bench.step()
        decode, chunk = rows(plan)
        assert decode == (short.slot, NEWEST, 1)  # each time, and first
        chunks.append(chunk[1:])
    assert chunks == [(0, 7), (7, 7), (14, 6)]
    bench.run()


def test_a_second_prompt_shares_a_plan_with_the_end_of_the_first() -> None:
    bench = Bench(max_num_batched_tokens=8)
    first, second = bench.submit("first", 10, 2), bench.submit("second", 10, 2)
    bench.step()
    assert not second.running
    plan = bench.step()
    assert rows(plan) == [(first.slot, 8, 2), (second.slot, 0, 6)]


def test_a_sequence_gets_the_blocks_of_all_it_knows_when_it_enters() -> None:
    bench = Bench(max_num_batched_tokens=8)
    sequence = bench.submit("a", 30, 2)
    plan = bench.step()
    assert len(plan.block_ids) == len(sequence.blocks) == 8
    assert sequence.num_computed == 8


def test_a_decode_gets_a_block_when_it_steps_into_it() -> None:
    bench = Bench()
    bench.submit("a", 7, 8)
    grants = [list(bench.step().block_counts) for _ in range(8)]
    #         7 tokens in 2 blocks; token 8 is in the second still; 9 needs the third, 13 a fourth
    assert grants == [[2], [], [1], [], [], [], [1], []]


def test_no_more_run_than_there_are_slots() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.submit(name, 2, 3)
    bench.step()
    assert bench.running == ["a", "b"]
    bench.run()
    assert bench.ended == ["a", "b", "c"]


def test_a_slot_and_blocks_go_on_with_the_plan_that_retires_them() -> None:
    bench = Bench(max_num_seqs=1, num_blocks=2)
    first, second = bench.submit("first", 6, 2), bench.submit("second", 6, 2)
    bench.step()
    slot, blocks = first.slot, list(first.blocks)
    bench.step()
    assert bench.ended == ["first"]
    plan = bench.step()
    assert list(plan.retired) == [slot]
    assert plan.entering[0].handle == second.handle
    assert set(plan.block_ids) == set(blocks)


def test_the_first_come_enters_first() -> None:
    bench = Bench(max_num_seqs=1)
    names = [f"r{number}" for number in range(20)]
    for name in names:
        bench.submit(name, 3, 2)
    bench.run()
    assert bench.ended == names


def test_a_large_request_is_not_overtaken_by_small_ones_for_ever() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=8)
    bench.submit("running", 8, 8)
    bench.step()
    bench.submit("large", 28, 4)
    for number in range(50):
        bench.submit(f"small{number}", 2, 2)
    bench.run()
    assert bench.ended[:2] == ["running", "large"]


@pytest.mark.parametrize(("num_blocks", "enters"), [(10, False), (11, True)])
def test_who_enters_leaves_a_block_for_each_that_runs(num_blocks: int, enters: bool) -> None:
    bench = Bench(num_blocks=num_blocks, max_num_batched_tokens=64)
    bench.submit("a", 16, 16)
    bench.step()
    second = bench.submit("b", 20, 2, first=100)  # 5 blocks, and one for a, which has taken 5
    third = bench.submit("c", 1, 2)
    bench.step()
    assert (second.running, third.running) == (enters, False)


def test_a_request_alone_needs_no_headroom() -> None:
    bench = Bench(num_blocks=4)
    sequence = bench.submit("a", 16, 1)
    bench.run()
    assert_complete(sequence)


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    bench = Bench(num_blocks=8)
    old, young = bench.submit("old", 12, 20), bench.submit("young", 12, 20, first=100)
    bench.step()
    waiting = bench.submit("waiting", 2, 2)
    while young.running:
        plan = bench.step()
    assert old.running and bench.core.counters.preemptions == 1
    assert len(plan.retired) == 1
    assert not plan.entering  # who gave way frees blocks for the others, not for newcomers
    assert bench.core.waiting.first is young
    bench.run()
    order = [old.handle, young.handle, young.handle, waiting.handle]
    assert bench.executor.entered == order
    assert_complete(young)


@pytest.mark.parametrize(("prefix_caching", "start"), [(False, 0), (True, 12)])
def test_one_that_comes_back_is_computed_from_where_it_is_not_cached(
    prefix_caching: bool, start: int
) -> None:
    bench = Bench(num_blocks=8, prefix_caching=prefix_caching)
    old = bench.submit("old", 12, 20)
    young = bench.submit("young", 12, 20, first=100)
    bench.step()
    while young.running:
        bench.step()
    bench.core.abort(old.request_id)  # before it has taken what the other left
    known = list(young.token_ids)
    assert len(known) > 12
    result = bench.plan()
    (entering,) = bench.plans[-1].entering
    assert (entering.prompt_tokens, list(entering.token_ids)) == (12, known)
    assert rows(bench.plans[-1])[-1][1] == start
    bench.apply(result)
    bench.run()
    assert_complete(young)
    assert young.num_cached == bench.core.fleet.cache_stats.hits == 0  # its own are no hits


def test_an_aborted_prefill_gives_back_all_at_once() -> None:
    bench = Bench(max_num_batched_tokens=8)
    sequence = bench.submit("a", 30, 2)
    bench.step()
    assert 0 < sequence.num_computed < 30
    bench.core.abort(sequence.request_id)
    assert_idle(bench.core)


def test_a_retired_slot_waits_for_the_next_plan() -> None:
    bench = Bench()
    gone, next_one = bench.submit("gone", 3, 20), None
    bench.step()
    slot = gone.slot
    bench.core.abort(gone.request_id)
    assert bench.core.plan() == []  # nothing to compute is no plan
    next_one = bench.submit("next", 3, 1)
    assert list(bench.step().retired) == [slot]
    assert_complete(next_one)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_the_executor_decides_the_end(ignore_eos: bool) -> None:
    bench = Bench()
    sequence = bench.submit("a", 5, 150, ignore_eos=ignore_eos)
    results: list[int] = []
    while bench.core.num_requests:
        result = bench.plan()
        results += result.finishes
        bench.apply(result)
    last = FinishReason.LENGTH if ignore_eos else FinishReason.STOP
    assert (results[-1], set(results[:-1])) == (last, {0})
    assert_complete(sequence)

"""What the core makes of cached prefixes: who finds what, when, and what is never found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.sequence import Sequence
from shared.types import int32s
from tests.services.scheduler.core_bench import Bench, assert_complete, assert_idle, submit

BLOCK = 4  # tokens, as in the bench


def cached(bench: Bench, name: str, *args: int, **options: object) -> int:
    """Tokens found for this request, which runs to its end."""
    sequence = bench.submit(name, *args, **options)
    bench.run()
    assert_complete(sequence)
    return sequence.num_cached


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_prompt_that_was_there_before_is_found(spare: int) -> None:
    bench = Bench()
    prompt = 5 * BLOCK + spare
    assert cached(bench, "first", prompt) == 0
    assert cached(bench, "second", prompt) == (prompt - 1) // BLOCK * BLOCK  # never the last token
    stats = bench.core.fleet.cache_stats
    assert (stats.queries, stats.hits) == (2 * prompt, (prompt - 1) // BLOCK * BLOCK)
    assert bench.executor.computed == 2 * (prompt + 7) - stats.hits
    assert_idle(bench.core)


def test_a_prompt_whose_tokens_are_to_be_told_of_is_computed_and_found_by_others() -> None:
    bench = Bench()
    assert cached(bench, "first", 21, prompt_logprobs=0) == 0
    assert cached(bench, "second", 21) == 20
    assert cached(bench, "third", 21, prompt_logprobs=0) == 0
    assert cached(bench, "fourth", 21) == 20


def test_a_prompt_is_found_while_another_runs_with_it() -> None:
    bench = Bench()
    first = bench.submit("first", 13, 20)
    bench.step()
    second = bench.submit("second", 13, 20)
    bench.step()
    assert (first.num_cached, second.num_cached) == (0, 12)
    assert second.blocks[:3] == first.blocks[:3]
    bench.run()
    assert_complete(first)
    assert_complete(second)


@pytest.mark.parametrize(("confirmed", "found"), [(False, 0), (True, 12)])
def test_of_an_aborted_request_only_what_a_result_confirmed_is_found(
    confirmed: bool, found: int
) -> None:
    bench = Bench()
    first = bench.submit("first", 13, 20)
    result = bench.plan()
    if confirmed:
        bench.apply(result)
    bench.core.abort(first.request_id)
    if not confirmed:
        bench.apply(result)
    second = bench.submit("second", 13, 2)
    bench.run()
    assert second.num_cached == found


def test_an_answer_is_found_by_the_next_turn() -> None:
    bench = Bench()
    first = bench.submit("first", 10, 9)
    bench.run()
    turn = replace(submit("turn"), token_ids=int32s([*first.token_ids, 1, 2, 3]))
    second = bench.core.submit(turn)
    assert isinstance(second, Sequence)
    bench.run()
    assert second.num_cached == 16  # of 19 tokens; the KV of the last was never computed


def test_chunks_do_not_hide_a_prompt() -> None:
    bench = Bench(max_num_batched_tokens=2 * BLOCK)
    assert cached(bench, "first", 10 * BLOCK) == 0
    assert cached(bench, "second", 10 * BLOCK) == 9 * BLOCK


@pytest.mark.parametrize(("salt", "other", "hits"), [("x", "x", 12), ("x", "y", 0), ("", "x", 0)])
def test_a_salt_shares_with_itself_alone(salt: str, other: str, hits: int) -> None:
    bench = Bench()
    assert cached(bench, "first", 13, cache_salt=salt) == 0
    assert cached(bench, "second", 13, cache_salt=other) == hits


def test_tenants_and_urgencies_share() -> None:
    bench = Bench()
    cached(bench, "first", 13, tenant="a", priority=1)
    assert cached(bench, "second", 13, tenant="b") == 12


def test_nothing_is_found_when_it_is_off() -> None:
    bench = Bench(prefix_caching=False)
    assert [cached(bench, name, 13) for name in ("first", "second")] == [0, 0]
    assert bench.core.fleet.cache_stats.hits == 0
    assert bench.executor.computed == 2 * 20


@pytest.mark.parametrize("block_size", [4, 2])
def test_the_next_executor_has_nothing_cached_and_the_totals_go_on(block_size: int) -> None:
    bench = Bench()
    cached(bench, "first", 13)
    running = bench.submit("running", 13, 30)
    bench.step()
    assert running.num_cached == 12
    bench.disconnect()
    bench.reconnect(block_size=block_size, num_blocks=128)
    bench.run()
    assert_complete(running)
    assert cached(bench, "second", 13) == 12
    assert bench.core.fleet.cache_stats.hits == 24
    assert bench.core.fleet.cache_stats.queries == 3 * 13


def test_the_least_recently_used_is_evicted() -> None:
    bench = Bench(num_blocks=8)
    cached(bench, "a", 13, 2)
    cached(bench, "b", 13, 2, first=100)
    assert cached(bench, "a again", 13, 2) == 12
    cached(bench, "c", 13, 2, first=200)
    assert bench.core.fleet.cache_stats.evictions > 0
    assert cached(bench, "a once more", 13, 2) == 12
    assert cached(bench, "b again", 13, 2, first=100) < 12


def test_a_shared_prompt_needs_its_blocks_once() -> None:
    bench = Bench(num_blocks=11, max_num_seqs=4, max_num_batched_tokens=64)
    bench.submit("first", 29, 3)
    bench.step()
    others = [bench.submit(name, 29, 3) for name in ("second", "third")]
    bench.step()  # 8 blocks, and one more for each of the others
    assert bench.running == ["first", "second"]  # a third would leave none for these two
    bench.run()
    assert [one.num_cached for one in others] == [28, 28]
    assert bench.core.counters.preemptions == 0

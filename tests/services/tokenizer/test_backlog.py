from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer import backlog as module
from services.tokenizer.backlog import Backlog, Job
from shared.messages import Decode, Encode, Prompt
from shared.types import RequestId, int32s


def job(name: str, characters: int = 1, gateway: str = "g") -> Job:
    return Job(Encode(RequestId(name), Prompt(text="x" * characters)), gateway)


def names(jobs: list[Job]) -> list[str]:
    return [str(one.request_id) for one in jobs]


def test_small_jobs_go_together_and_a_large_one_alone() -> None:
    backlog = Backlog()
    for name, size in [("a", 10), ("b", 10), ("c", module.BATCH_BYTES), ("d", 10)]:
        assert backlog.add(job(name, size))
    assert [names(backlog.take()) for _ in range(4)] == [["a", "b"], ["c"], ["d"], []]


def test_a_batch_has_a_most_of_jobs() -> None:
    backlog = Backlog()
    for number in range(module.BATCH_REQUESTS + 1):
        assert backlog.add(job(str(number)))
    assert [len(backlog.take()) for _ in range(2)] == [module.BATCH_REQUESTS, 1]


def test_sizes_are_those_of_the_prompt() -> None:
    ids = int32s([1, 2, 3])
    assert Job(Decode(RequestId("a"), ids), "g").size == 12
    assert Job(Encode(RequestId("a"), Prompt(token_ids=ids)), "g").size == 12
    assert Job(Encode(RequestId("a"), Prompt(chat="1234")), "g").size == 4


def test_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)
    backlog = Backlog()
    assert [backlog.add(job(name)) for name in "abc"] == [True, True, False]
    backlog.take()
    assert backlog.add(job("c"))


def test_bytes_are_bounded_but_one_is_always_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    backlog = Backlog()
    assert backlog.add(job("a", 100))
    assert not backlog.add(job("b", 1))
    backlog.forget(RequestId("a"))
    assert [backlog.add(job(name, 5)) for name in "bcd"] == [True, True, False]


def test_a_forgotten_job_is_not_answered() -> None:
    backlog = Backlog()
    for name in "abc":
        backlog.add(job(name))
    backlog.forget(RequestId("b"))
    batch = backlog.take()
    backlog.forget(RequestId("c"))
    assert [backlog.finish(one) for one in batch] == [True, False]
    assert backlog.empty


def test_a_job_sent_again_is_answered_once() -> None:
    backlog = Backlog()
    first, second = job("a"), job("a")
    backlog.add(first)
    backlog.take()
    backlog.add(second)
    backlog.take()
    assert [backlog.finish(one) for one in (first, second, second)] == [False, True, False]


def test_a_lost_gateway_takes_its_jobs_along() -> None:
    backlog = Backlog()
    for name in "abcd":
        backlog.add(job(name, gateway="g" if name in "ac" else "h"))
    backlog.forget_where(lambda one: one.gateway == "g")
    assert names(backlog.take()) == ["b", "d"]


@given(st.lists(st.tuples(st.sampled_from("atff"), st.integers(0, 9), st.integers(0, 40_000))))
def test_nothing_is_left_over(steps: list[tuple[str, int, int]]) -> None:
    """Whatever was added, taken, finished and forgotten: at the end the books are empty."""
    backlog = Backlog()
    for action, number, size in steps:
        if action == "a":
            backlog.add(job(str(number), size))
        elif action == "t":
            for one in backlog.take()[: size % 3]:
                assert backlog.finish(one)
        else:
            backlog.forget(RequestId(str(number)))
    backlog.forget_where(lambda one: True)
    assert backlog.empty
    assert backlog._bytes == 0

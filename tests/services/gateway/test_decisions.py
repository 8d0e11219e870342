"""The small pure decisions: admission, routing, readiness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.admission import Admission
from services.gateway.readiness import PATH, Readiness
from services.gateway.routing import Outstanding, detokenizer_of, work_of
from shared.messages import Credit, Prompt
from shared.types import RequestId, ServiceName, int32s

GATEWAY, TOKENIZER, SCHEDULER, EXECUTOR, DETOKENIZER = ServiceName


def status_of(admission: Admission, new: int, in_flight: int = 0, **more: list[str]) -> int:
    problem = admission.problem(new, in_flight, ["a", "b"], **more)
    if problem is None:
        return 200
    assert (problem.failure.status in (429, 503)) == ("retry-after" in problem.headers)
    return problem.failure.status


def test_admission() -> None:
    admission = Admission()
    assert status_of(admission, 1) == 503
    admission.credit("a", Credit(max_num_seqs=1, max_queue=4, running=0, waiting=0))
    assert [status_of(admission, 1, busy) for busy in (0, 4, 5)] == [200, 200, 429]
    assert [status_of(admission, new) for new in (5, 6)] == [200, 400]
    admission.credit("b", Credit(max_num_seqs=2, max_queue=0, running=0, waiting=0))
    admission.credit("gone", Credit(max_num_seqs=9, max_queue=9, running=0, waiting=0))
    assert [status_of(admission, new) for new in (7, 8)] == [200, 400]
    admission.credit("a", Credit(max_num_seqs=0, max_queue=4, running=0, waiting=0))
    assert [status_of(admission, new) for new in (2, 3)] == [200, 400]
    admission.forget("b")
    assert status_of(admission, 1) == 503


def test_admission_says_what_is_absent_and_drains() -> None:
    admission = Admission()
    admission.credit("a", Credit(max_num_seqs=1, max_queue=0, running=0, waiting=0))
    assert status_of(admission, 1, absent=["tokenizer"]) == 503
    assert status_of(admission, 1) == 200
    admission.closed = True
    assert status_of(admission, 1) == 503


def test_admission_goes_on_during_a_short_outage() -> None:
    now = 0.0
    admission = Admission(clock=lambda: now)
    admission.changed(["a"], ["tokenizer"])
    assert status_of(admission, 1, absent=["tokenizer"]) == 503  # it was never whole
    admission.credit("a", Credit(max_num_seqs=1, max_queue=3, running=0, waiting=0))
    admission.changed(["a"], [])
    now = 100.0
    admission.changed(["a"], ["tokenizer"])
    assert [status_of(admission, 1, busy, absent=["tokenizer"]) for busy in (0, 4)] == [200, 429]
    now = 129.0
    admission.credit("a", Credit(max_num_seqs=0, max_queue=0, running=0, waiting=0))
    admission.changed(["a"], [])  # still no executor
    assert status_of(admission, 4) == 200
    now = 131.0
    assert status_of(admission, 1) == 503
    admission.credit("a", Credit(max_num_seqs=1, max_queue=0, running=0, waiting=0))
    admission.changed(["a"], [])
    assert status_of(admission, 1) == 200
    admission.changed(["a"], ["detokenizer"])
    assert status_of(admission, 1, absent=["detokenizer"]) == 200


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=30))
def test_the_least_loaded_tokenizer_is_chosen(sent: list[tuple[str, int]]) -> None:
    outstanding = Outstanding()
    work = dict.fromkeys("abc", 0)
    for name, amount in sent:
        outstanding.add(name, amount)
        work[name] += amount
    chosen = outstanding.choose(["a", "b", "c"])
    assert chosen is not None
    assert work[chosen] == min(work.values())
    for name, amount in sent:
        outstanding.done(name, amount)
    last = {name: place for place, (name, _) in enumerate(sent)}
    assert outstanding.choose(["c", "b"]) == min("cb", key=lambda name: last.get(name, -1))


def test_idle_tokenizers_take_turns() -> None:
    outstanding, names = Outstanding(), ["a", "b", "c"]
    chosen = []
    for _ in range(6):
        name = outstanding.choose(names)
        assert name is not None
        chosen.append(name)
        outstanding.add(name, 3)
        outstanding.done(name, 3)
    assert chosen == [*names, *names]


def test_a_new_life_of_a_tokenizer_has_nothing_to_do() -> None:
    outstanding = Outstanding()
    assert outstanding.choose([]) is None
    outstanding.add("a", 5)
    assert outstanding.choose(["a", "b"]) == "b"
    outstanding.forget("a")
    outstanding.done("a", 5)
    assert outstanding.choose(["a", "b"]) == "a"


def test_work() -> None:
    assert work_of(Prompt(text="x" * 100)) > work_of(Prompt(chat="x" * 50))
    assert work_of(Prompt(token_ids=int32s(range(100)))) == 1


def test_detokenizers_share_the_requests() -> None:
    names = ["d.0", "d.1", "d.2"]
    ids = [RequestId(f"request {number}") for number in range(300)]
    shards = [detokenizer_of(one, names) for one in ids]
    assert shards == [detokenizer_of(one, names) for one in ids]
    assert all(60 < shards.count(name) < 140 for name in names)
    assert detokenizer_of(ids[0], []) is None


def whole() -> Readiness:
    readiness = Readiness()
    for service in PATH:
        readiness.joined(service, f"{service}.0")
    return readiness


def test_ready_after_a_probe() -> None:
    readiness = Readiness()
    assert readiness.absent == list(PATH)
    assert readiness.missing == []
    readiness = whole()
    assert readiness.whole
    assert not readiness.ready
    readiness.passed(readiness.life)
    assert readiness.ready


@pytest.mark.parametrize("service", [*PATH, EXECUTOR])
def test_a_lost_service_is_missing_until_it_is_back_and_probed(service: ServiceName) -> None:
    readiness = whole()
    readiness.joined(service, "only")
    readiness.passed(readiness.life)
    for name in ("only", f"{service}.0"):
        readiness.lost(service, name)
    assert readiness.missing == [service]
    assert not readiness.ready
    before = readiness.life
    readiness.joined(service, "only")
    assert (readiness.missing, readiness.ready) == ([], False)
    readiness.passed(before - 1)  # a probe that began before the loss
    assert not readiness.ready
    readiness.passed(before)
    assert readiness.ready


def test_one_of_two_instances_is_no_loss() -> None:
    readiness = whole()
    readiness.joined(TOKENIZER, "tokenizer.1")
    readiness.passed(readiness.life)
    readiness.lost(TOKENIZER, "tokenizer.1")
    readiness.lost(TOKENIZER, "never seen")
    assert readiness.ready


def test_other_gateways_may_come_and_go() -> None:
    readiness = whole()
    readiness.joined(GATEWAY, "gateway.1")
    readiness.lost(GATEWAY, "gateway.1")
    assert readiness.missing == []

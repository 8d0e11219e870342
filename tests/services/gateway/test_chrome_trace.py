"""Events of instances as a trace that Chrome and Perfetto can show."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.chrome_trace import render
from shared.trace import NONE, Event
from shared.types import ServiceName
from tests.trace_format import shown

EXECUTOR = (ServiceName.MODEL_EXECUTOR, "model-executor.0")
TOKENIZER = (ServiceName.TOKENIZER, "10.0.0.7:7102")
NAMES = ["iteration", "encode", "Plan", "plan", 'a "quoted" \u00fcnicode']

counts = st.integers(NONE, 2**31)


@st.composite
def events(draw: st.DrawFn) -> Event:
    began = draw(st.integers(0, 50)) * 1000
    length = draw(st.integers(0, 20)) * 1000
    name = draw(st.sampled_from(NAMES))
    return Event(name, began, began + length, draw(counts), draw(counts), draw(counts))


instances = st.tuples(st.sampled_from(ServiceName), st.sampled_from(["gateway.0", "10.0.0.7:1"]))


@given(st.dictionaries(instances, st.lists(events(), max_size=8), max_size=4))
def test_any_events_make_a_valid_trace(given: dict[tuple[ServiceName, str], list[Event]]) -> None:
    """Overlapping ones too: they get threads of their own."""
    found = shown(json.loads(render(given, [])))
    names = sorted(event.name for all_of_one in given.values() for event in all_of_one)
    assert sorted(event.name for event in found) == names


def test_an_iteration_says_what_it_computed() -> None:
    noted = [Event("iteration", 2_000_000_001, 2_020_000_001, 7, 64, 512)]
    [event] = shown(json.loads(render({EXECUTOR: noted}, [])))
    assert event.args == {"step": 7, "decode_rows": 64, "prefill_tokens": 512}
    assert (event.process, event.thread) == ("model-executor 0", "compute")
    assert (event.began, event.ended) == (2_000_000.001, 2_020_000.001)  # us


def test_texts_encoded_at_once_are_beside_each_other() -> None:
    spans = [(0, 10), (2, 5), (5, 9), (10, 12)]
    noted = [Event("encode", *span, NONE, 1, NONE) for span in spans]
    found = shown(json.loads(render({TOKENIZER: noted}, [])))
    assert [event.thread for event in found] == ["threads", "threads 2", "threads 2", "threads"]
    assert {event.process for event in found} == {"tokenizer 10.0.0.7:7102"}


def test_processes_come_in_the_order_of_a_tokens_way() -> None:
    noted: dict[tuple[ServiceName, str], list[Event]] = {
        (service, f"{service}.{n}"): [] for service in ServiceName for n in (1, 0)
    }
    trace = json.loads(render(noted, []))
    titles = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    order = ["tokenizer", "scheduler", "model-executor", "detokenizer", "gateway"]
    assert titles == [f"{service} {number}" for service in order for number in (0, 1)]


def test_who_did_not_answer_is_named() -> None:
    trace = json.loads(render({}, [EXECUTOR]))
    assert trace["otherData"] == {"unanswered": ["model-executor 0"]}
    assert trace["traceEvents"] == []

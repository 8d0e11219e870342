"""The service's messages: what each brings about, and what each loss does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from services.scheduler.service import SchedulerService
from shared.messages import (
    Abort,
    Admitted,
    Credit,
    MetricsReply,
    MetricsRequest,
    Open,
    Plan,
    Refused,
    Route,
)
from shared.types import Incarnation, RequestId
from tests.services.scheduler.core_bench import ROUTE, ran, submit
from tests.services.scheduler.scheduler_scene import (
    DETOKENIZER,
    EXECUTOR,
    GATEWAY,
    TOKENIZER,
    Scene,
)

if TYPE_CHECKING:
    from tests.conftest import Stations


def abort(name: str) -> Abort:
    return Abort(RequestId(name), "a test")


async def test_the_life_of_a_request(stations: Stations) -> None:
    scene = await Scene.set(stations)
    request = submit("a", 5, 3)
    scene.say(TOKENIZER, request)
    opened = await scene.hear(DETOKENIZER, Open)
    assert opened == Open(
        RequestId("a"), opened.handle, "gateway.0", request.token_ids, request.params
    )
    plan = await scene.hear(EXECUTOR, Plan)
    (entering,) = plan.entering
    assert (entering.handle, entering.detokenizer) == (opened.handle, "detokenizer.0")
    assert await scene.credit(running=1) == Credit(4, 1024, running=1, waiting=0)
    assert (scene.metric("num_requests_running"), scene.metric("kv_cache_usage_perc")) > (0, 0)
    scene.say(EXECUTOR, scene.compute(plan))
    await scene.finish(1)
    assert await scene.credit(running=0) == Credit(4, 1024, running=0, waiting=0)
    assert not scene.scheduler.busy
    assert scene.metric("num_requests_running") == scene.metric("kv_cache_usage_perc") == 0
    assert scene.metric("prompt_tokens_total") == 5
    assert scene.metric("generation_tokens_total") == 3
    assert scene.metric("request_queue_time_seconds_count") == 1


async def test_the_gateway_hears_what_was_cached(stations: Stations) -> None:
    scene = await Scene.set(stations)
    for name in ("a", "b"):
        scene.say(TOKENIZER, submit(name, 13, 3))
        await scene.finish(1)
    assert await scene.hear(GATEWAY, Admitted) == Admitted(RequestId("b"), 12)
    assert scene.metric("prefix_cache_queries_total") == 26
    assert scene.metric("prefix_cache_hits_total") == 12
    assert scene.metric("prefix_cache_evictions_total") == 0


async def test_who_traces_requests_hears_of_each_admission(stations: Stations) -> None:
    scene = await Scene.set(stations, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    scene.say(TOKENIZER, submit("a", 13, 3))
    assert await scene.hear(GATEWAY, Admitted) == Admitted(RequestId("a"), 0)


async def test_only_the_first_admission_is_looked_up(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, submit("a", 13, 3))
    await scene.finish(1)
    scene.say(TOKENIZER, second := submit("b", 13, 30))
    await scene.iterate()
    assert (await scene.hear(GATEWAY, Admitted)).cached_tokens == 12
    await scene.lose(EXECUTOR)
    await scene.credit(max_num_seqs=0)
    for _ in range(2):
        await scene.hear(DETOKENIZER, Open)
    await scene.recalled(ran(second, 1))
    await scene.place(EXECUTOR)
    await scene.announce()
    await scene.finish(1)
    assert scene.metric("prefix_cache_queries_total") == 26


async def test_the_prefix_cache_can_be_put_off(stations: Stations) -> None:
    scene = await Scene.set(stations, enable_prefix_caching=False)
    for name in ("a", "b"):
        scene.say(TOKENIZER, submit(name, 13, 3))
        await scene.finish(1)
    assert scene.metric("prefix_cache_hits_total") == 0


async def test_an_open_ended_request_stays_so_for_the_next_scheduler(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, submit("a", 5, None))
    assert (await scene.hear(DETOKENIZER, Open)).params.max_tokens is None
    assert (await scene.hear(EXECUTOR, Plan)).entering[0].params.max_tokens == 195


async def test_refusals_go_to_the_gateway(stations: Stations) -> None:
    scene = await Scene.set(stations, max_queue=0)
    scene.say(TOKENIZER, submit("long", 300, 1))
    refused = await scene.hear(GATEWAY, Refused)
    assert (refused.request_id, refused.failure.status) == ("long", 400)
    scene.say(TOKENIZER, *(submit(f"r{number}") for number in range(6)))
    refused_ids = [(await scene.hear(GATEWAY, Refused)).request_id for _ in range(2)]
    assert refused_ids == ["r4", "r5"]
    await scene.finish(4)


async def test_an_abort_before_its_request_leaves_no_trace(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, abort("a"), submit("a"), submit("b"))
    assert (await scene.hear(DETOKENIZER, Open)).request_id == "b"
    await scene.finish(1)


async def test_an_aborted_request_leaves_its_slot_at_once(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, submit("a", 5, 100), submit("b", 5, 100))
    while len(scene.executor.slots) < 2:
        await scene.iterate()
    slots = {o.entered.handle: slot for slot, o in scene.executor.slots.items()}
    handles = [(await scene.hear(DETOKENIZER, Open)).handle for _ in range(2)]
    plan = await scene.hear(EXECUTOR, Plan)
    scene.say(DETOKENIZER, abort("a"))
    await scene.credit(running=1, waiting=0)
    scene.say(EXECUTOR, scene.compute(plan))
    plan = await scene.hear(EXECUTOR, Plan)
    assert list(plan.retired) == [slots[handles[0]]]
    scene.compute(plan)
    scene.say(GATEWAY, abort("b"))
    await scene.credit(running=0)


async def test_the_requests_of_a_lost_gateway_end_everywhere(stations: Stations) -> None:
    scene = await Scene.set(stations)
    other = await stations.station(GATEWAY, index=1)
    await stations.linked(other, scene.scheduler)
    theirs = Route(other.name, ROUTE.detokenizer)
    scene.say(TOKENIZER, submit("ours", 5, 6), submit("theirs", 5, 190, route=theirs))
    for _ in range(2):
        await scene.hear(DETOKENIZER, Open)
    plan = await scene.hear(EXECUTOR, Plan)
    await stations.leave(other)
    assert (await scene.hear(DETOKENIZER, Abort)).request_id == "theirs"
    scene.say(EXECUTOR, scene.compute(plan))
    await scene.finish(1)
    await scene.credit(running=0, waiting=0)


async def test_results_of_others_are_ignored(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, submit("a", 5, 8))
    result = scene.compute(await scene.hear(EXECUTOR, Plan))
    scene.say(EXECUTOR, replace(result, epoch=Incarnation(result.epoch + 1)))
    scene.say(DETOKENIZER, result)
    scene.say(TOKENIZER, MetricsRequest(RequestId("m")))
    scene.say(GATEWAY, MetricsRequest(RequestId("m")))
    assert (
        "headrace_generation_tokens_total 0.0"
        in (await scene.hear(GATEWAY, MetricsReply)).exposition
    )
    scene.say(EXECUTOR, result)
    await scene.finish(1)


async def test_a_gateway_that_joins_hears_the_credit(stations: Stations) -> None:
    scene = await Scene.set(stations, max_queue=7)
    other = await stations.station(GATEWAY, index=1)
    await stations.linked(other, scene.scheduler)
    assert await other.next(Credit) == Credit(4, 7, 0, 0)


async def test_credit_is_sent_when_it_changes_only(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, submit("a", 5, 4))
    await scene.finish(1)
    credits = [await scene.at[GATEWAY].next(Credit) for _ in range(2)]
    assert [(credit.running, credit.waiting) for credit in credits] == [(1, 0), (0, 0)]
    scene.say(GATEWAY, MetricsRequest(RequestId("m")))
    await scene.at[GATEWAY].next(MetricsReply)  # and no credit before it


async def test_a_fault_of_the_planner_ends_the_service(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("a fault")

    service = stations.service(SchedulerService)
    with capture_logs() as logs:
        monkeypatch.setattr(service, "_publish_credit", broken)
        service._take_turn_soon()  # type: ignore[attr-defined]
        assert await service.run() == 1
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["service failed"]

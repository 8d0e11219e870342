"""What becomes of a scheduler's requests when an executor or a detokenizer is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from services.scheduler import service as scheduler_service
from services.scheduler.core import MAX_EXECUTOR_DEATHS, POISON
from services.scheduler.service import NO_DETOKENIZER, NO_EXECUTOR, SchedulerService
from shared.codec import Identity, encode
from shared.messages import (
    Abort,
    Failed,
    Gone,
    Open,
    Plan,
    Recall,
    Recalled,
    Refused,
    Reopen,
    Roster,
    Route,
    Submit,
    Withdraw,
)
from shared.types import Handle, Incarnation, RequestId
from tests.conftest import until
from tests.services.scheduler.core_bench import CAPACITY, ROUTE, ran, submit
from tests.services.scheduler.scheduler_scene import (
    DETOKENIZER,
    EXECUTOR,
    GATEWAY,
    SCHEDULER,
    TOKENIZER,
    Scene,
    heard,
)
from tests.shared.mesh_member import raw_push

if TYPE_CHECKING:
    from tests.conftest import Station, Stations

A = RequestId("a")


async def under_way(stations: Stations, tokens: int, request: Submit) -> Scene:
    """One request, of which so many tokens were generated."""
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, request)
    await scene.hear(DETOKENIZER, Open)
    for _ in range(tokens):
        await scene.iterate()
    return scene


async def next_executor(scene: Scene) -> None:
    await scene.credit(max_num_seqs=0)
    await scene.place(EXECUTOR)
    await scene.announce()


async def entered(scene: Scene) -> list[int]:
    """How many tokens of each sequence the next executor's first plan has; it is computed."""
    plan = await scene.hear(EXECUTOR, Plan)
    scene.say(EXECUTOR, scene.compute(plan))
    return [len(entering.token_ids) for entering in plan.entering]


# --- executors


@pytest.mark.parametrize("told", [0, 1, 3, 4, 6])
async def test_what_ran_on_a_lost_executor_goes_on_from_what_its_detokenizer_has(
    stations: Stations, told: int
) -> None:
    """It may have been told more than the scheduler, or less."""
    request = submit("a", 5, 8)
    scene = await under_way(stations, 3, request)
    await scene.lose(EXECUTOR)
    assert (await scene.credit(max_num_seqs=0)).waiting == 1
    await scene.place(EXECUTOR)
    await scene.announce()
    await scene.recalled(ran(request, told))
    assert await entered(scene) == [5 + told]
    await scene.finish(1)
    assert scene.metric("recoveries_total", service="model-executor") == 1


async def test_a_detokenizer_that_lost_the_thread_before_the_recall_finds_it(
    stations: Stations,
) -> None:
    """What it submits for that reason is an answer as well, and it waits for an `Open`."""
    request = submit("a", 5, 8)
    scene = await under_way(stations, 3, request)
    await scene.lose(EXECUTOR)
    await scene.recalled(ran(request, 3))
    opened = await scene.hear(DETOKENIZER, Open)
    assert (opened.handle, opened.output_tokens) == (2, 3)
    await next_executor(scene)
    assert await entered(scene) == [8]
    await scene.finish(1)


async def test_nothing_runs_before_the_detokenizer_has_answered(stations: Stations) -> None:
    request = submit("a", 5, 8)
    scene = await under_way(stations, 3, request)
    await scene.lose(EXECUTOR)
    await scene.credit(max_num_seqs=0)
    await scene.place(EXECUTOR)
    credit = await scene.announce()
    assert (credit.running, credit.waiting) == (0, 1)
    await scene.hear(DETOKENIZER, Recall)
    scene.say(DETOKENIZER, ran(request, 3))
    await scene.caught_up()
    assert scene.scheduler._core.fleet.num_running == 0  # others may be missing
    scene.say(DETOKENIZER, Recalled(1))
    assert await entered(scene) == [8]
    await scene.finish(1)


async def test_what_had_ended_at_the_detokenizer_only_ends(stations: Stations) -> None:
    scene = await under_way(stations, 7, submit("a", 5, 8))
    await scene.lose(EXECUTOR)
    await scene.recalled()
    await scene.credit(max_num_seqs=0, waiting=0)
    assert not scene.scheduler.busy


async def test_what_had_ended_at_the_scheduler_only_runs_again(stations: Stations) -> None:
    request = submit("a", 5, 2)
    scene = await under_way(stations, 0, request)
    await scene.finish(1)
    await scene.credit(running=0)
    await scene.lose(EXECUTOR)
    await scene.recalled(ran(request, 1))
    opened = await scene.hear(DETOKENIZER, Open)
    assert (opened.request_id, opened.output_tokens, opened.handle) == ("a", 1, 2)
    await next_executor(scene)
    assert await entered(scene) == [6]


async def test_the_answer_to_a_former_recall_drops_nothing(stations: Stations) -> None:
    request = submit("a", 5, 8)
    scene = await under_way(stations, 1, request)
    await scene.lose(EXECUTOR)
    await next_executor(scene)
    scene.say(EXECUTOR, replace(CAPACITY, session=4))  # and lost again
    assert [(await scene.hear(DETOKENIZER, Recall)).number for _ in range(2)] == [1, 2]
    scene.executor.capacity = replace(CAPACITY, session=4)
    scene.say(DETOKENIZER, Recalled(1), ran(request, 1), Recalled(2))
    assert await entered(scene) == [6]
    await scene.finish(1)


async def test_an_abort_while_recalled(stations: Stations) -> None:
    """It overtakes what the detokenizer submits: that must not run."""
    request = submit("a", 5, 8)
    scene = await under_way(stations, 3, request)
    await scene.lose(EXECUTOR)
    scene.say(GATEWAY, Abort(A, "left"))
    await scene.hear(DETOKENIZER, Recall)
    assert (await scene.hear(DETOKENIZER, Abort)).request_id == A  # the gateway's may be lost
    await scene.credit(max_num_seqs=0, waiting=0)
    await scene.place(EXECUTOR)
    await scene.announce()
    scene.say(DETOKENIZER, ran(request, 3), Recalled(1))
    await scene.caught_up()  # and no `Open` before it
    assert not scene.scheduler.busy


async def test_an_executor_that_announces_itself_anew_has_lost_all(stations: Stations) -> None:
    request = submit("a", 5, 8)
    scene = await under_way(stations, 1, request)
    former = scene.compute(await scene.hear(EXECUTOR, Plan))
    again = replace(CAPACITY, session=4)
    scene.executor = type(scene.executor)(again)
    scene.say(EXECUTOR, again, former)  # which is late by now
    await scene.recalled(ran(request, 1))
    assert await entered(scene) == [6]
    await scene.finish(1)
    assert scene.metric("late_tokens_total") == 1


async def test_a_repeated_announcement_changes_nothing(stations: Stations) -> None:
    scene = await under_way(stations, 1, submit("a", 5, 8))
    scene.say(EXECUTOR, CAPACITY)
    await scene.finish(1)


async def test_an_executor_hears_whom_the_scheduler_has(stations: Stations) -> None:
    scene = Scene(stations, await stations.serve(SchedulerService))
    await scene.place(EXECUTOR)
    assert (await scene.at[EXECUTOR].next(Roster)).executors == []
    scene.say(EXECUTOR, CAPACITY)
    assert (await scene.at[EXECUTOR].next(Roster)).executors == [scene.at[EXECUTOR].name]
    await scene.place(GATEWAY)
    scene.say(EXECUTOR, Withdraw())
    assert (await scene.at[EXECUTOR].next(Roster)).executors == []
    await scene.credit(max_num_seqs=0)


async def test_an_executor_is_taken_only_when_it_can_be_sent_plans(stations: Stations) -> None:
    """Its link to us may be up long before ours to it."""
    scene = Scene(stations, await stations.serve(SchedulerService))
    for service in (GATEWAY, TOKENIZER, DETOKENIZER):
        await scene.place(service)
    with raw_push(Path(stations.directory), "scheduler.0") as push:
        push.send(encode(CAPACITY, Identity(EXECUTOR, "model-executor.0", Incarnation(1))))
        push.send(encode(submit("a"), scene.at[TOKENIZER].mesh.identity))
        await scene.credit(waiting=1, max_num_seqs=0)
        await scene.place(EXECUTOR)
        await scene.credit(max_num_seqs=4)
        assert len((await scene.hear(EXECUTOR, Plan)).entering) == 1


async def test_an_executor_of_another_model_is_refused(stations: Stations) -> None:
    scene = await Scene.set(stations)
    await scene.lose(EXECUTOR)
    await scene.credit(max_num_seqs=0)
    await scene.place(EXECUTOR)
    with capture_logs() as logs:
        scene.say(EXECUTOR, replace(CAPACITY, fingerprint="another"))
        await until(lambda: any(log["log_level"] == "error" for log in logs))
    (error,) = [log for log in logs if log["log_level"] == "error"]
    assert "another" in error["reason"] and CAPACITY.fingerprint in error["reason"]
    scene.say(TOKENIZER, submit("a"))
    await scene.credit(max_num_seqs=0, waiting=1)


async def test_a_second_executor_takes_over_when_the_first_is_lost(stations: Stations) -> None:
    scene = await Scene.set(stations)
    standby = await stations.station(EXECUTOR, index=1)
    await stations.linked(standby, scene.scheduler)
    await heard(standby, Roster)
    standby.say(SCHEDULER, CAPACITY)
    scene.say(TOKENIZER, request := submit("a", 5, 8))
    await scene.hear(DETOKENIZER, Open)
    await scene.iterate()
    await scene.lose(EXECUTOR)
    await scene.recalled(ran(request, 1))
    plan = await heard(standby, Plan)
    assert [len(entering.token_ids) for entering in plan.entering] == [6]


async def test_a_second_executor_that_left_is_forgotten(stations: Stations) -> None:
    scene = await Scene.set(stations)
    standby = await stations.station(EXECUTOR, index=1)
    await stations.linked(standby, scene.scheduler)
    await heard(standby, Roster)
    standby.say(SCHEDULER, CAPACITY)
    await until(lambda: standby.name in scene.scheduler._core.fleet.names)
    await stations.leave(standby)
    next_life = await stations.station(EXECUTOR, index=1)  # which is not ready yet
    await stations.linked(next_life, scene.scheduler)
    await scene.lose(EXECUTOR)
    scene.say(TOKENIZER, submit("a"))
    await scene.credit(max_num_seqs=0, waiting=1)


async def test_poison_is_failed_in_the_end(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, request := submit("poison", 5, 100))
    await scene.hear(DETOKENIZER, Open)
    for death in range(1, MAX_EXECUTOR_DEATHS + 1):
        await scene.hear(EXECUTOR, Plan)
        await scene.lose(EXECUTOR)
        await scene.credit(max_num_seqs=0)
        if death < MAX_EXECUTOR_DEATHS:
            await scene.recalled(ran(request, 0))
            await scene.hear(DETOKENIZER, Open)
            await scene.place(EXECUTOR)
            await scene.announce()
    assert await scene.hear(DETOKENIZER, Failed) == Failed(RequestId("poison"), POISON)
    assert not scene.scheduler.busy


async def test_requests_do_not_wait_for_ever_for_an_executor(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_service, "GRACE_SECONDS", 0.2)
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, *(submit(f"r{number}", 5, 100) for number in range(6)))
    for _ in range(6):
        await scene.hear(DETOKENIZER, Open)
    await scene.lose(EXECUTOR)
    failed = [await scene.hear(DETOKENIZER, Failed) for _ in range(6)]
    assert {one.request_id for one in failed} == {f"r{number}" for number in range(6)}
    assert {one.failure for one in failed} == {NO_EXECUTOR}


async def test_an_executor_in_time_ends_the_grace(stations: Stations) -> None:
    request = submit("a", 5, 8)
    scene = await under_way(stations, 1, request)
    await scene.lose(EXECUTOR)
    await scene.recalled(ran(request, 1))
    grace = scene.scheduler._grace
    assert grace is not None
    await scene.credit(max_num_seqs=0)
    await scene.place(EXECUTOR)
    await scene.announce()
    assert grace.cancelled()
    await scene.finish(1)


async def test_what_a_smaller_executor_cannot_hold_is_failed(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(TOKENIZER, submit("large", 100, 50), submit("small", 5, 3))
    for _ in range(2):
        await scene.hear(DETOKENIZER, Open)
    await scene.lose(EXECUTOR)
    await scene.credit(max_num_seqs=0)
    await scene.recalled(ran(submit("large", 100, 50), 0))  # the other has not run
    await scene.hear(DETOKENIZER, Open)
    await scene.place(EXECUTOR)
    await scene.announce(replace(CAPACITY, num_blocks=20))
    failed = await scene.hear(DETOKENIZER, Failed)
    assert (failed.request_id, failed.failure.status) == ("large", 400)
    await scene.finish(1)


# --- detokenizers


async def another(scene: Scene) -> Station:
    """A second detokenizer."""
    station = await scene.stations.station(DETOKENIZER, index=1)
    await scene.stations.linked(station, scene.scheduler)
    return station


async def test_requests_of_a_lost_detokenizer_are_opened_on_another(stations: Stations) -> None:
    request = submit("a", 5, 8)
    scene = await under_way(stations, 2, request)
    plan = await scene.hear(EXECUTOR, Plan)
    spare = await another(scene)
    await scene.lose(DETOKENIZER)
    await scene.credit(running=0, waiting=1)
    scene.say(EXECUTOR, scene.compute(plan))  # its token counts, too
    opened = await heard(spare, Open)
    assert opened == Open(
        A, Handle(2), "gateway.0", ran(request, 3).token_ids, request.params, output_tokens=3
    )
    plan = await scene.hear(EXECUTOR, Plan)
    (entering,) = plan.entering
    assert (entering.detokenizer, len(entering.token_ids)) == (spare.name, 8)
    scene.say(EXECUTOR, scene.compute(plan))
    await scene.finish(1)
    assert scene.metric("recoveries_total", service="detokenizer") == 1


async def test_whoever_is_opened_later_has_a_later_handle(stations: Stations) -> None:
    """Its tokens may overtake its `Open`, and are late to a detokenizer that knows later ones."""
    scene = await Scene.set(stations)
    elsewhere = Route("gateway.0", "detokenizer.1")
    scene.say(TOKENIZER, submit("a", 5, 2, route=elsewhere), submit("b", 5, 2))
    assert (await scene.hear(DETOKENIZER, Open)).handle == 2
    assert (await heard(await another(scene), Open)).handle == 3
    await scene.finish(2)


async def test_a_finish_that_the_lost_one_may_not_have_told_comes_again(
    stations: Stations,
) -> None:
    scene = await under_way(stations, 1, submit("a", 5, 2))
    plan = await scene.hear(EXECUTOR, Plan)
    spare = await another(scene)
    await scene.lose(DETOKENIZER)
    await scene.credit(running=0, waiting=1)
    scene.say(EXECUTOR, scene.compute(plan))
    assert (await heard(spare, Open)).output_tokens == 1
    await scene.finish(1)
    while scene.scheduler.busy:
        await scene.credit()


async def test_what_is_told_of_tokens_is_computed_again(stations: Stations) -> None:
    request = submit("a", 5, 8)
    request = replace(request, params=replace(request.params, logprobs=1))
    scene = await under_way(stations, 2, request)
    plan = await scene.hear(EXECUTOR, Plan)
    spare = await another(scene)
    await scene.lose(DETOKENIZER)
    await scene.credit(running=0, waiting=1)
    scene.say(EXECUTOR, scene.compute(plan))
    assert (await heard(spare, Open)).output_tokens == 0
    assert (await entered(scene)) == [5]


async def test_requests_wait_for_a_detokenizer(stations: Stations) -> None:
    scene = await under_way(stations, 2, submit("a", 5, 8))
    plan = await scene.hear(EXECUTOR, Plan)
    await scene.lose(DETOKENIZER)
    await scene.credit(running=0, waiting=1)
    scene.say(EXECUTOR, scene.compute(plan))
    scene.say(TOKENIZER, submit("b"))
    await scene.credit(running=0, waiting=2)
    await scene.place(DETOKENIZER)
    assert [(await scene.hear(DETOKENIZER, Open)).request_id for _ in "ab"] == ["a", "b"]
    async with scene.computing():
        await scene.credit(running=0, waiting=0)


async def test_but_not_for_ever(stations: Stations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_service, "GRACE_SECONDS", 0.1)
    scene = await under_way(stations, 1, submit("a", 5, 8))
    await scene.lose(DETOKENIZER)
    assert await scene.hear(GATEWAY, Refused) == Refused(A, NO_DETOKENIZER)
    assert not scene.scheduler.busy


async def test_an_abort_while_set_aside(stations: Stations) -> None:
    scene = await under_way(stations, 1, submit("a", 5, 8))
    await scene.lose(DETOKENIZER)
    await scene.credit(running=0, waiting=1)
    scene.say(GATEWAY, Abort(A, "left"))
    await scene.credit(running=0, waiting=0)
    await scene.place(DETOKENIZER)
    await scene.caught_up()  # and no `Open` before it
    assert not scene.scheduler.busy


async def test_a_gateway_may_hear_first(stations: Stations) -> None:
    request = submit("a", 5, 8)
    scene = await under_way(stations, 1, request)
    scene.say(GATEWAY, Reopen(A, "detokenizer.7"))  # it has left that one already
    plan = await scene.hear(EXECUTOR, Plan)
    scene.say(GATEWAY, Reopen(A, ROUTE.detokenizer))
    await scene.credit(running=0, waiting=1)
    scene.say(EXECUTOR, scene.compute(plan))
    assert (await scene.hear(DETOKENIZER, Open)).output_tokens == 2
    await scene.finish(1)
    await scene.credit(running=0, waiting=0)
    scene.say(GATEWAY, Reopen(A, ROUTE.detokenizer))
    assert await scene.hear(GATEWAY, Gone) == Gone(A)


async def test_a_detokenizer_that_missed_tokens_is_told_of_all(stations: Stations) -> None:
    request = submit("a", 5, 8)
    scene = await under_way(stations, 3, request)
    plan = await scene.hear(EXECUTOR, Plan)
    scene.say(DETOKENIZER, ran(request, 1))
    await scene.credit(running=0, waiting=1)
    scene.say(EXECUTOR, scene.compute(plan))
    assert (await scene.hear(DETOKENIZER, Open)).output_tokens == 4
    await scene.finish(1)


# --- what another scheduler had


async def test_what_ran_under_another_scheduler_goes_on(stations: Stations) -> None:
    """Even in a full queue and without an executor; the detokenizer's link may come later."""
    own = {"max_queue": 0, "max_num_seqs": 1, "run_ahead": 0, "max_lease": 0}
    scene = Scene(stations, await stations.serve(SchedulerService, **own))
    for service in (GATEWAY, TOKENIZER):
        await scene.place(service)
    scene.say(TOKENIZER, submit("first", 5, 8), submit("refused"))
    assert (await scene.hear(GATEWAY, Refused)).request_id == "refused"
    scene.say(GATEWAY, Abort(RequestId("first"), "left"))
    await scene.credit(waiting=0)
    elsewhere = replace(ran(submit("a", 5, 8), 3), route=Route("gateway.0", "detokenizer.1"))
    scene.say(TOKENIZER, elsewhere)
    await scene.credit(waiting=1)
    await scene.place(DETOKENIZER)
    later = await another(scene)
    assert (await heard(later, Open)).output_tokens == 3
    await scene.place(EXECUTOR)
    await scene.announce()
    assert await entered(scene) == [8]
    await scene.finish(1)


async def test_what_does_not_fit_here_ends_at_its_detokenizer(stations: Stations) -> None:
    scene = await Scene.set(stations)
    scene.say(DETOKENIZER, ran(submit("a", 150, 100), 3))
    failed = await scene.hear(DETOKENIZER, Failed)
    assert (failed.request_id, failed.failure.status) == ("a", 400)

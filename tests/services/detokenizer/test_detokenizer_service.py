from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from services.detokenizer import service as detokenizer_service
from services.detokenizer.service import DetokenizerService
from shared.codec import Identity, encode
from shared.messages import (
    Abort,
    Accepted,
    Credit,
    Deltas,
    Finished,
    MetricsReply,
    MetricsRequest,
    Open,
    Recall,
    Recalled,
    Released,
    Route,
    StepResult,
    Submit,
)
from shared.sampling import SamplingParams
from shared.settings import BadSetting
from shared.types import FinishReason, Handle, Incarnation, RequestId, ServiceName, int32s
from tests.conftest import PATIENCE, until
from tests.shared.mesh_member import raw_push

if TYPE_CHECKING:
    from tests.conftest import Station, Stations

GATEWAY, SCHEDULER, EXECUTOR, DETOKENIZER = (
    ServiceName.GATEWAY,
    ServiceName.SCHEDULER,
    ServiceName.MODEL_EXECUTOR,
    ServiceName.DETOKENIZER,
)
REQUEST = RequestId("r")


def opened(gateway: str = "gateway.0", stop: str = "Never") -> Open:
    params = SamplingParams(seed=1, max_tokens=100, stop=[stop])
    return Open(REQUEST, Handle(1), gateway, int32s([1]), params)


def step(scheduler: Station, place: int, token: int, finish: FinishReason) -> StepResult:
    epoch = scheduler.mesh.identity.incarnation
    columns = int32s([1]), int32s([1 + place]), int32s([token]), bytes([finish])
    return StepResult(epoch, place, *columns)


@pytest.fixture
def hello(model_dir: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode("Hi you!").ids
    return ids


async def test_tokens_in_text_out(stations: Stations, hello: list[int]) -> None:
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    scheduler = await stations.station(SCHEDULER)
    executor = await stations.station(EXECUTOR)
    await stations.linked(service, gateway, scheduler)
    await stations.linked(executor, service)
    scheduler.say(DETOKENIZER, opened())
    assert await gateway.next(Accepted) == Accepted(REQUEST, 1, "scheduler.0")
    text = ""
    for place, token in enumerate(hello):
        last = place == len(hello) - 1
        finish = FinishReason.LENGTH if last else FinishReason.NONE
        executor.say(DETOKENIZER, step(scheduler, place, token, finish))
        deltas = await gateway.next(Deltas)
        text += deltas.texts[0]
        assert list(deltas.token_counts) == [place + 1]
    assert text == "Hi you!"
    assert deltas.finished == [Finished(REQUEST, FinishReason.LENGTH, len(hello))]
    assert not service.busy
    gateway.say(DETOKENIZER, MetricsRequest(RequestId("m")))
    exposition = (await gateway.next(MetricsReply)).exposition
    assert f"headrace_detokenizer_tokens_total {len(hello)}.0" in exposition


async def test_a_stop_string_reaches_gateway_and_scheduler(
    stations: Stations, hello: list[int]
) -> None:
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    scheduler = await stations.station(SCHEDULER)
    executor = await stations.station(EXECUTOR)
    await stations.linked(service, gateway, scheduler)
    await stations.linked(executor, service)
    scheduler.say(DETOKENIZER, opened(stop="Hi"))
    await gateway.next(Accepted)
    executor.say(DETOKENIZER, step(scheduler, 0, hello[0], FinishReason.NONE))
    assert (await gateway.next(Deltas)).finished[0].stop_reason == "Hi"
    assert (await scheduler.next(Abort)).request_id == REQUEST


async def test_what_a_gateway_is_told_before_it_is_linked_reaches_it(
    stations: Stations, hello: list[int]
) -> None:
    service = await stations.serve(DetokenizerService)
    scheduler = await stations.station(SCHEDULER)
    executor = await stations.station(EXECUTOR)
    await stations.linked(service, scheduler)
    await stations.linked(executor, service)
    scheduler.say(DETOKENIZER, opened())
    executor.say(DETOKENIZER, step(scheduler, 0, hello[0], FinishReason.LENGTH))
    gateway = await stations.station(GATEWAY)
    await gateway.next(Accepted)
    assert (await gateway.next(Deltas)).texts == ["Hi"]


async def test_a_lost_gateway_ends_what_it_asked(stations: Stations) -> None:
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, gateway, scheduler)
    scheduler.say(DETOKENIZER, opened())
    await gateway.next(Accepted)
    service.peer_lost(GATEWAY, gateway.name)
    assert (await scheduler.next(Abort)).request_id == REQUEST
    assert not service.busy


async def test_what_a_lost_scheduler_had_goes_to_the_next_that_comes(stations: Stations) -> None:
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, gateway, scheduler)
    scheduler.say(DETOKENIZER, opened())
    await gateway.next(Accepted)
    await stations.leave(scheduler)
    await until(lambda: service._core.num_orphans == 1)
    successor = await stations.station(SCHEDULER)
    submit = await successor.next(Submit)
    assert (submit.request_id, submit.output_tokens) == (REQUEST, 0)
    assert submit.route == Route("gateway.0", "detokenizer.0")
    successor.say(DETOKENIZER, opened())
    assert await gateway.next(Accepted) == Accepted(REQUEST, 1, "scheduler.0")
    assert service._grace is None
    labels = {"service": "scheduler"}
    assert service.registry.get_sample_value("headrace_recoveries_total", labels) == 1


async def test_but_it_does_not_wait_for_ever(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detokenizer_service, "GRACE_SECONDS", 0.1)
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, gateway, scheduler)
    scheduler.say(DETOKENIZER, opened())
    await gateway.next(Accepted)
    await stations.leave(scheduler)
    [end] = (await gateway.next(Deltas)).finished
    assert end.failure is not None and end.failure.status == 503
    assert not service.busy


@pytest.mark.parametrize("returns", [True, False])
async def test_a_scheduler_may_speak_when_it_is_dead(
    stations: Stations, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """We were told of its loss before that, and it will not be lost again."""
    monkeypatch.setattr(detokenizer_service, "DOUBT_SECONDS", PATIENCE if returns else 0.05)
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    await stations.linked(service, gateway)
    with raw_push(Path(stations.directory), "detokenizer.0") as push:
        push.send(encode(opened(), Identity(SCHEDULER, "scheduler.0", Incarnation(1))))
        await gateway.next(Accepted)
    heir = await stations.station(SCHEDULER, index=0 if returns else 1)
    if returns:  # should it be the same life, it has to let go
        assert (await heir.next(Released)).request_ids == [REQUEST]
    assert (await heir.next(Submit)).request_id == REQUEST


async def test_a_scheduler_without_executors_loses_its_requests_to_one_that_has_some(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detokenizer_service, "PATIENCE_SECONDS", 0.05)
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    poor = await stations.station(SCHEDULER)
    await stations.linked(service, gateway, poor)
    poor.say(DETOKENIZER, Credit(0, 0, 0, 1), opened())
    await gateway.next(Accepted)
    rich = await stations.station(SCHEDULER, index=1)
    await stations.linked(service, rich)
    rich.say(DETOKENIZER, Credit(4, 9, 0, 0))
    assert await poor.next(Released) == Released([REQUEST])
    assert (await rich.next(Submit)).request_id == REQUEST
    poor.say(DETOKENIZER, opened())  # it was on its way
    assert await poor.next(Released) == Released([REQUEST])
    rich.say(DETOKENIZER, opened())
    assert (await gateway.next(Accepted)).scheduler == rich.name


async def test_a_recall_is_answered(stations: Stations) -> None:
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, gateway, scheduler)
    scheduler.say(DETOKENIZER, opened(), Recall(2))
    assert (await scheduler.next(Submit)).output_tokens == 0
    assert await scheduler.next(Recalled) == Recalled(2)


async def test_an_abort_ends_a_request_without_an_answer(stations: Stations) -> None:
    service = await stations.serve(DetokenizerService)
    gateway = await stations.station(GATEWAY)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, gateway, scheduler)
    scheduler.say(DETOKENIZER, opened())
    await gateway.next(Accepted)
    gateway.say(DETOKENIZER, Abort(REQUEST, "left"), MetricsRequest(RequestId("m")))
    await gateway.next(MetricsReply)  # and nothing before it
    assert not service.busy


async def test_a_model_without_a_tokenizer_is_a_bad_setting(
    stations: Stations, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    with pytest.raises(BadSetting, match=r"tokenizer\.json"):
        stations.service(DetokenizerService, model=str(tmp_path))

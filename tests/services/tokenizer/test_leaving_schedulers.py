"""A scheduler that leaves is given nothing new, unless it is the only one."""

from __future__ import annotations

from services.tokenizer.service import TokenizerService
from shared.messages import Submit
from shared.types import ServiceName
from tests.conftest import Station, Stations, until
from tests.services.tokenizer.test_tokenizer_service import generate

GATEWAY, SCHEDULER, TOKENIZER = ServiceName.GATEWAY, ServiceName.SCHEDULER, ServiceName.TOKENIZER


async def withdraw(scheduler: Station, service: TokenizerService) -> None:
    scheduler.mesh.withdraw()
    await until(lambda: scheduler.name not in service.mesh.peers(SCHEDULER))


async def test_another_gets_what_is_new(stations: Stations) -> None:
    service = await stations.serve(TokenizerService)
    gateway = await stations.station(GATEWAY)
    first, second = [await stations.station(SCHEDULER, index) for index in range(2)]
    await stations.linked(service, gateway, first, second)
    await withdraw(first, service)
    names = [str(number) for number in range(8)]
    gateway.say(TOKENIZER, *[generate(name, f"Count to {name}") for name in names])
    assert {(await second.next(Submit)).request_id for _ in names} == set(names)


async def test_the_only_one_gets_what_was_on_its_way(stations: Stations) -> None:
    service = await stations.serve(TokenizerService)
    gateway, scheduler = await stations.station(GATEWAY), await stations.station(SCHEDULER)
    await stations.linked(service, gateway, scheduler)
    await withdraw(scheduler, service)
    gateway.say(TOKENIZER, generate("a", "Hello"))
    assert (await scheduler.next(Submit)).request_id == "a"
    assert not service.busy

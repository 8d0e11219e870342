from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from services.tokenizer import backlog
from services.tokenizer import service as tokenizer_service
from services.tokenizer.service import TokenizerService
from shared.messages import (
    Abort,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Generate,
    Prompt,
    Refused,
    Route,
    Submit,
)
from shared.sampling import Grammar, GrammarKind, SamplingParams
from shared.types import EXIT_BAD_SETTING, RequestId, ServiceName, int32s
from tests.conftest import until

if TYPE_CHECKING:
    from tests.conftest import Station, Stations

GATEWAY, SCHEDULER, TOKENIZER = ServiceName.GATEWAY, ServiceName.SCHEDULER, ServiceName.TOKENIZER
LONG = "all work and no play " * 100_000  # 2 MB


def generate(name: str, text: str, gateway: str = "gateway.0") -> Generate:
    params = SamplingParams(seed=1, max_tokens=4)
    return Generate(RequestId(name), Prompt(text=text), params, Route(gateway, "detokenizer.0"))


async def placed(stations: Stations) -> tuple[Station, Station, TokenizerService]:
    """A gateway, a scheduler, and the service between them."""
    service = await stations.serve(TokenizerService)
    gateway = await stations.station(GATEWAY)
    scheduler = await stations.station(SCHEDULER)
    await stations.linked(service, gateway, scheduler)
    gateway.say(TOKENIZER, Encode(RequestId("loaded?"), Prompt(text="")))
    await gateway.next(Encoded)
    return gateway, scheduler, service


async def test_prompts_go_to_the_scheduler_and_refusals_back(stations: Stations) -> None:
    gateway, scheduler, service = await placed(stations)
    good = [generate(str(number), f"Count to {number}") for number in range(200)]
    gateway.say(TOKENIZER, *good[:100], generate("bad", ""), *good[100:])
    submits = [await scheduler.next(Submit) for _ in good]
    assert {submit.request_id for submit in submits} == {one.request_id for one in good}
    assert {submit.route for submit in submits} == {good[0].route}
    refused = await gateway.next(Refused)
    assert (refused.request_id, refused.failure.status) == ("bad", 400)
    assert not service.busy


async def test_questions_are_answered_to_whoever_asked(stations: Stations) -> None:
    gateway, _, _ = await placed(stations)
    gateway.say(TOKENIZER, Encode(RequestId("e"), Prompt(text="Hello world")))
    assert await gateway.next(Encoded) == Encoded(RequestId("e"), int32s([19556, 905]), 8192)
    gateway.say(TOKENIZER, Decode(RequestId("d"), int32s([19556, 905])))
    assert await gateway.next(Decoded) == Decoded(RequestId("d"), "Hello world")


async def test_requests_wait_for_a_scheduler(stations: Stations) -> None:
    service = await stations.serve(TokenizerService)
    gateway = await stations.station(GATEWAY)
    await stations.linked(service, gateway)
    gateway.say(TOKENIZER, generate("a", "Hello"), generate("b", "Hi"))
    gateway.say(TOKENIZER, Encode(RequestId("e"), Prompt(text="x")))
    assert (await gateway.next(Encoded)).request_id == "e"
    await until(lambda: len(service._unplaced) == 2)
    gateway.say(TOKENIZER, Abort(RequestId("a"), "left"))
    scheduler = await stations.station(SCHEDULER)
    assert (await scheduler.next(Submit)).request_id == "b"
    assert not service.busy
    assert service._patience is None


async def test_but_not_for_ever(stations: Stations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_service, "SCHEDULER_SECONDS", 0.05)
    service = await stations.serve(TokenizerService)
    gateway = await stations.station(GATEWAY)
    await stations.linked(service, gateway)
    gateway.say(TOKENIZER, generate("r", "Hello"))
    failure = (await gateway.next(Refused)).failure
    assert (failure.status, failure.code) == (503, "service_unavailable")
    assert not service.busy


async def test_not_all_can_wait_for_a_scheduler(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_service, "MAX_REQUESTS", 1)
    service = await stations.serve(TokenizerService)
    gateway = await stations.station(GATEWAY)
    await stations.linked(service, gateway)
    gateway.say(TOKENIZER, generate("a", "Hello"), generate("b", "Hello"))
    assert (await gateway.next(Refused)).failure.status == 503


async def test_a_very_long_prompt_holds_up_neither_the_loop_nor_others(stations: Stations) -> None:
    gateway, scheduler, _ = await placed(stations)
    gateway.say(TOKENIZER, generate("long", LONG), generate("short", "Hello"))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    assert (await scheduler.next(Submit)).request_id == "short"
    refused = await gateway.next(Refused)
    counting.cancel()
    assert (refused.request_id, refused.failure.code) == ("long", "context_length_exceeded")
    assert turns > 100  # the loop went round all the while


async def test_what_is_aborted_here_goes_no_further(stations: Stations) -> None:
    gateway, scheduler, service = await placed(stations)
    gateway.say(TOKENIZER, generate("a", LONG), Abort(RequestId("a"), "left"), generate("b", "Hi"))
    assert (await scheduler.next(Submit)).request_id == "b"
    gateway.say(TOKENIZER, Encode(RequestId("e"), Prompt(text="x")))
    assert (await gateway.next(Encoded)).request_id == "e"  # and nothing about "a"
    assert not service.busy


async def test_a_full_backlog_is_a_503(stations: Stations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_REQUESTS", 1)
    gateway, _, _ = await placed(stations)
    gateway.say(TOKENIZER, *(generate(str(number), LONG) for number in range(4)))
    refused = await gateway.next(Refused)  # two are in threads and one waits
    assert (refused.request_id, refused.failure.status) == ("3", 503)


async def test_a_lost_gateway_leaves_nothing_behind(stations: Stations) -> None:
    gateway, scheduler, service = await placed(stations)
    gateway.say(
        TOKENIZER,
        *(generate(str(number), LONG, "gateway.1") for number in range(4)),
        generate("mine", "Hi"),
    )
    await scheduler.next(Submit)
    service.peer_lost(GATEWAY, "gateway.1")
    assert not service.busy


@pytest.mark.parametrize(
    ("template", "level"), [(None, "info"), ("{{ broken", "warning"), ("{{ messages }}", None)]
)
async def test_a_template_that_cannot_be_used_is_told_at_the_start(
    stations: Stations, model_dir: Path, tmp_path: Path, template: str | None, level: str | None
) -> None:
    """R107"""
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).symlink_to(model_dir / name)
    config = {} if template is None else {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with structlog.testing.capture_logs() as lines:
        service = await stations.serve(TokenizerService, model=str(tmp_path))
        gateway = await stations.station(GATEWAY)
        await stations.linked(service, gateway)
        gateway.say(TOKENIZER, Encode(RequestId("text"), Prompt(text="Hi")))
        assert (await gateway.next(Encoded)).token_ids
    told = [line["log_level"] for line in lines if line["event"] == "no chats will be served"]
    assert told == ([] if level is None else [level])


async def test_a_context_that_is_too_long_is_refused_at_the_start(stations: Stations) -> None:
    service = stations.service(TokenizerService, max_model_len=9999)
    with structlog.testing.capture_logs() as logs:
        assert await service.run() == EXIT_BAD_SETTING
    assert "9999 is more than the model's own 8192" in str(logs)


async def test_a_grammar_is_checked_while_others_go_by(stations: Stations) -> None:
    def structured(name: str, source: str) -> Generate:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, source)
        question = generate(name, "Hello")
        return replace(question, params=replace(question.params, grammar=grammar))

    gateway, scheduler, service = await placed(stations)
    good = structured("good", '{"type": "object"}')
    gateway.say(TOKENIZER, structured("bad", '{"type": "objekt"}'), good, generate("free", "Hi"))
    assert (await scheduler.next(Submit)).request_id == "free"
    refused = await gateway.next(Refused)
    assert (refused.request_id, refused.failure.status) == ("bad", 400)
    assert "objekt" in refused.failure.message
    submit = await scheduler.next(Submit)
    assert (submit.request_id, submit.params) == ("good", good.params)
    gateway.say(
        TOKENIZER, structured("left", '{"type": "array"}'), Abort(RequestId("left"), "left")
    )
    gateway.say(TOKENIZER, structured("last", '{"type": "string"}'))
    assert (await scheduler.next(Submit)).request_id == "last"
    assert not service.busy

"""What the soak asks for: a fixed set of greedy requests of all kinds, and how one is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import httpx

TOPICS = [
    "The river came down from the hills and",
    "List the planets, one a line:\n1.",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a miller who",
    "Q: Why is the sky blue?\nA:",
    "Ein kleiner Bach fließt durch das Tal, und 水車 が",
]
LONG = "The wheel of the mill turns day and night, and the water never asks why. " * 4
STOPS: list[list[str]] = [[], [" water", "\n\n"], [], ["return", ". "]]
TENANTS = ["", "anna", "bert", "carla"]
LENGTHS = [16, 200, 96, 160]  # tokens


class Answer(NamedTuple):
    """What must be the same whenever and beside whomever a request runs."""

    text: str
    finish_reason: str | None
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Case:
    """One request to one of the endpoints."""

    path: str
    body: dict[str, Any]


def make_cases() -> list[Case]:
    """All topics, short and behind a long beginning that they share, with varied parameters."""
    cases = []
    for number, (lead, topic) in enumerate(product(("", LONG), TOPICS + TOPICS)):
        prompt = lead + topic
        body: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": LENGTHS[number % 4],
            "priority": number % 3 - 1,
            "ignore_eos": number % 2 == 0,
        }
        if tenant := TENANTS[number // 2 % 4]:
            body["user"] = tenant
        if stop := STOPS[number // 3 % 4]:
            body["stop"] = stop
        if number % 5 == 0:
            body["cache_salt"] = f"salt {number % 2}"
        if number % 3 == 2:
            body["messages"] = [{"role": "user", "content": prompt}]
            cases.append(Case("/v1/chat/completions", body))
        else:
            body["prompt"] = prompt
            cases.append(Case("/v1/completions", body))
    return cases


async def ask(client: httpx.AsyncClient, case: Case, *, streaming: bool) -> Answer | None:
    """The answer, or None if the server is full; raises httpx.HTTPError for anything else."""
    if not streaming:
        response = await client.post(case.path, json=case.body)
        return _whole(response.json()) if _accepted(response) else None
    body = case.body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", case.path, json=body) as response:
        if not _accepted(response):
            return None
        lines = [line async for line in response.aiter_lines()]
        return _joined([line for line in lines if line and not line.startswith(":")])  # comments


def _accepted(response: httpx.Response) -> bool:
    if response.status_code == 429 and "Retry-After" in response.headers:
        return False
    response.raise_for_status()
    return True


def _whole(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(text, choice["finish_reason"], answer["usage"]["completion_tokens"])


def _joined(lines: list[str]) -> Answer:
    *events, end = [line.removeprefix("data: ") for line in lines]
    if end != "[DONE]":
        raise httpx.RemoteProtocolError(f"a stream ended with {end!r}")
    text, reasons, tokens = "", [], 0
    for event in map(json.loads, events):
        if "error" in event:
            raise httpx.RemoteProtocolError(str(event["error"]))
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            reasons.append(choice["finish_reason"])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    return Answer(text, reasons[-1], tokens)

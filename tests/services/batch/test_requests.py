"""Lines of OpenAI's batch format, and lines that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.batch.requests import BadLine, Request, read_request

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [], "temperature": 1.0, "seed": 2**70, "x": "\ud800é", "f": [1e-7, None]},
}


def test_the_body_arrives_as_it_was_written() -> None:
    request = read_request(json.dumps(GOOD).encode())
    assert request == Request("a", "/v1/chat/completions", request.body)
    assert json.loads(request.body) == GOOD["body"]
    assert b'"temperature": 1.0' in request.body  # and not 1


@pytest.mark.parametrize("line", [b"\xef\xbb\xbf%b", b"  %b\r"])
def test_what_editors_add_is_no_fault(line: bytes) -> None:
    assert read_request(line % json.dumps(GOOD).encode()).custom_id == "a"


@pytest.mark.parametrize(
    ("change", "code", "param", "custom_id"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id", None),
        ({"custom_id": 7}, "invalid_custom_id", "custom_id", None),
        ({"custom_id": ""}, "invalid_custom_id", "custom_id", None),
        ({"method": "GET"}, "invalid_method", "method", "a"),
        ({"method": None}, "invalid_method", "method", "a"),
        ({"url": None}, "invalid_url", "url", "a"),
        ({"url": "http://elsewhere/v1/completions"}, "invalid_url", "url", "a"),
        ({"url": "/v1/completions?x=1"}, "invalid_url", "url", "a"),
        ({"body": None}, "invalid_body", "body", "a"),
        ({"body": [GOOD]}, "invalid_body", "body", "a"),
        ({"body": {"stream": True}}, "invalid_body", "stream", "a"),
    ],
)
def test_faults_are_named(
    change: dict[str, Any], code: str, param: str, custom_id: str | None
) -> None:
    with pytest.raises(BadLine) as caught:
        read_request(json.dumps(GOOD | change).encode())
    failure = caught.value.failure
    assert (failure.code, failure.param) == (code, param)
    assert caught.value.custom_id == custom_id
    assert failure.message


@pytest.mark.parametrize("line", [b"{bad", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_lines_that_are_no_objects(line: bytes) -> None:
    with pytest.raises(BadLine) as caught:
        read_request(line)
    assert caught.value.failure.code == "invalid_json_line"
    assert caught.value.custom_id is None


def test_a_stream_of_false_or_null_is_none() -> None:
    for value in (False, None):
        line = json.dumps(GOOD | {"body": {"stream": value}}).encode()
        assert json.loads(read_request(line).body) == {"stream": value}

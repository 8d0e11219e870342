"""One line of a batch, in OpenAI's format."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from services.batch.failures import RequestFailed

URL = re.compile(r"/[A-Za-z0-9._~/-]+")


@dataclass(frozen=True, slots=True)
class Request:
    custom_id: str
    url: str  # a path, such as /v1/chat/completions; which ones there are, the server says
    body: bytes  # JSON


class BadLine(Exception):
    """A line that asks for nothing that can be done; `custom_id` is None if it has none."""

    def __init__(self, failure: RequestFailed, custom_id: str | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.custom_id = custom_id


def read_request(line: bytes) -> Request:
    """Raises BadLine."""
    values = _object(line)
    given = values.get("custom_id")
    custom_id = given if isinstance(given, str) and given else None

    def refuse(code: str, message: str, param: str) -> NoReturn:
        raise BadLine(RequestFailed(message, code=code, param=param), custom_id)

    if custom_id is None:
        missing = given is None
        code = "missing_required_parameter" if missing else "invalid_custom_id"
        refuse(code, "custom_id: must be a text that is not empty", "custom_id")
    if values.get("method") != "POST":
        refuse("invalid_method", "method: must be POST", "method")
    url = values.get("url")
    if not (isinstance(url, str) and URL.fullmatch(url)):
        refuse("invalid_url", "url: must be a path such as /v1/chat/completions", "url")
    body = values.get("body")
    if not isinstance(body, dict):
        refuse("invalid_body", "body: must be a JSON object", "body")
    if body.get("stream") not in (None, False):
        refuse("invalid_body", "body.stream: a batch cannot be streamed", "stream")
    return Request(custom_id, url, json.dumps(body).encode())


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.removeprefix(b"\xef\xbb\xbf"))  # as some editors begin a file
    except (ValueError, RecursionError) as error:
        reason = str(error) or "nested too deeply"
        failure = RequestFailed(f"the line is not JSON: {reason}"[:300], code="invalid_json_line")
        raise BadLine(failure) from None
    if not isinstance(values, dict):
        failure = RequestFailed("the line is no JSON object", code="invalid_json_line")
        raise BadLine(failure)
    return values

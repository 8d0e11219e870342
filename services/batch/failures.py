"""What can go wrong: with one request, or with the server as a whole."""

from __future__ import annotations

from typing import Any

NO_ANSWER = "no_answer"


class ServerGone(Exception):
    """The server cannot be used at all, so no request can be answered; the text says why."""


class RequestFailed(Exception):
    """One request was refused, or nobody answered it; the text is the server's own if it sent one.

    `status` is None if there was no answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


def failure_of(status: int, body: Any) -> RequestFailed | None:
    """What is wrong with an answer; None if it is a success."""
    if 200 <= status < 300:
        if isinstance(body, dict):
            return None
        return RequestFailed("the answer is no JSON object", status=status, code="invalid_answer")
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return RequestFailed(f"status {status}: {str(body)[:500]}", status=status)
    code = error.get("code") or error.get("type")
    return RequestFailed(
        str(error.get("message") or f"status {status}"),
        status=status,
        code=None if code is None else str(code),
        param=error.get("param"),
    )

"""Refusals and faults in OpenAI's error shape; every answer that is no success is made here."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from shared.messages import Failure

MAX_MESSAGE_CHARS = 2000  # an error never repeats much of what was sent
RETRY_AFTER_SECONDS = "1"


class ApiError(Exception):
    """Answers the request with this failure; `headers` go with it."""

    def __init__(self, failure: Failure, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.headers = dict(headers or {})


class ClientLeft(Exception):
    """The client closed its connection: nobody reads the answer."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is at fault."""
    return ApiError(Failure(HTTPStatus.BAD_REQUEST, message, param, code))


def model_not_found(name: str, known: list[str]) -> ApiError:
    message = f"The model {name[:200]!r} does not exist. Known: {', '.join(known)}."
    return ApiError(Failure(HTTPStatus.NOT_FOUND, message, "model", "model_not_found"))


def overloaded(message: str) -> ApiError:
    """429: come again when there is room."""
    failure = Failure(HTTPStatus.TOO_MANY_REQUESTS, message, code="rate_limit_exceeded")
    return of_failure(failure)


def unavailable(message: str) -> ApiError:
    """503: a part of the server is missing just now."""
    return of_failure(unavailable_failure(message))


def unavailable_failure(message: str) -> Failure:
    return Failure(HTTPStatus.SERVICE_UNAVAILABLE, message, code="service_unavailable")


def fault(message: str) -> Failure:
    """500: the server broke its own rules."""
    return Failure(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error")


def of_failure(failure: Failure) -> ApiError:
    """The answer to a failure that the mesh reported."""
    again = failure.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    return ApiError(failure, {"retry-after": RETRY_AFTER_SECONDS} if again else None)


def error_body(failure: Failure) -> dict[str, Any]:
    return {
        "error": {
            "message": failure.message[:MAX_MESSAGE_CHARS],
            "type": _type_of(failure.status),
            "param": failure.param,
            "code": failure.code,
        }
    }


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error_body(error.failure), error.failure.status, error.headers)


def _type_of(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return "invalid_request_error"


# --- what Starlette calls for exceptions that leave an endpoint ----------------------------------


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Routing's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    messages = {
        HTTPStatus.NOT_FOUND: f"Unknown route: {where}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"Not allowed here: {where}",
    }
    message = messages.get(HTTPStatus(error.status_code), error.detail)
    return error_response(ApiError(Failure(error.status_code, message), error.headers))


async def on_exception(request: Request, error: Exception) -> Response:
    """An unforeseen exception: its text is for the log, not for the client."""
    return error_response(ApiError(fault("The server had an error with this request.")))

"""Refusals and faults in OpenAI's error shape; every answer that is no success is made here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from shared.messages import Failure

MAX_MESSAGE_CHARS = 2000  # an error never repeats much of what was sent
RETRY_AFTER_SECONDS = 1
ANTHROPIC_TYPES: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.METHOD_NOT_ALLOWED: "invalid_request_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "invalid_request_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


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


def overloaded(message: str, retry_after: int = RETRY_AFTER_SECONDS) -> ApiError:
    """429: come again when there is room."""
    failure = Failure(HTTPStatus.TOO_MANY_REQUESTS, message, code="rate_limit_exceeded")
    return of_failure(failure, retry_after)


def unavailable(message: str) -> ApiError:
    """503: a part of the server is missing just now."""
    return of_failure(unavailable_failure(message))


def unavailable_failure(message: str) -> Failure:
    return Failure(HTTPStatus.SERVICE_UNAVAILABLE, message, code="service_unavailable")


def fault(message: str) -> Failure:
    """500: the server broke its own rules."""
    return Failure(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error")


def of_failure(failure: Failure, retry_after: int = RETRY_AFTER_SECONDS) -> ApiError:
    """The answer to a failure that the mesh reported."""
    again = failure.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    return ApiError(failure, {"retry-after": str(retry_after)} if again else None)


def noted(failure: Failure) -> str:
    """What may be kept of it: messages of refusals quote what a client has sent."""
    if failure.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return failure.message
    return " ".join(filter(None, ("refused:", failure.param, failure.code)))


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same of a field by the name that it has in another dialect, if it has another there."""
    param = error.failure.param
    if param is None or param not in names:
        return error
    message = error.failure.message.replace(param, names[param])
    return ApiError(replace(error.failure, param=names[param], message=message), error.headers)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """What is raised here names fields as another dialect does."""
    try:
        yield
    except ApiError as error:
        raise renamed(error, names) from None


def error_body(failure: Failure) -> dict[str, Any]:
    return {
        "error": {
            "message": failure.message[:MAX_MESSAGE_CHARS],
            "type": _type_of(failure.status),
            "param": failure.param,
            "code": failure.code,
        }
    }


def error_body_at(path: str, failure: Failure) -> dict[str, Any]:
    """The same, in the form that clients of this path expect."""
    if path.startswith("/v2/"):  # Open Inference Protocol
        return {"error": failure.message[:MAX_MESSAGE_CHARS]}
    if path.startswith("/v1/messages"):  # Anthropic's
        kind = ANTHROPIC_TYPES.get(failure.status, "api_error")
        message = failure.message[:MAX_MESSAGE_CHARS]
        return {"type": "error", "error": {"type": kind, "message": message}}
    return error_body(failure)


def error_response(error: ApiError, path: str) -> JSONResponse:
    body = error_body_at(path, error.failure)
    return JSONResponse(body, error.failure.status, error.headers)


def _type_of(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return "invalid_request_error"


# --- what Starlette calls for exceptions that leave an endpoint ----------------------------------


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Routing's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    messages = {
        HTTPStatus.NOT_FOUND: f"Unknown route: {where}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"Not allowed here: {where}",
    }
    message = messages.get(HTTPStatus(error.status_code), error.detail)
    refused = ApiError(Failure(error.status_code, message), error.headers)
    return error_response(refused, request.url.path)


async def on_exception(request: Request, error: Exception) -> Response:
    """An unforeseen exception: its text is for the log, not for the client."""
    failed = ApiError(fault("The server had an error with this request."))
    return error_response(failed, request.url.path)

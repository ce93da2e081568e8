"""Errors as clients see them: OpenAI's error object, whatever went wrong, and never the text of an exception."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_PARAMS = re.compile(r"^sampling_params(\[\d+\])?\.")
"""What the engine puts before a field that a request has by itself."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}


class ErrorObject(Struct):
    """What went wrong; ``param`` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct):
    """OpenAI's error object."""

    error: ErrorObject


class ApiError(HTTPException):
    """An answer other than the one that was asked for.

    Attributes:
        code: what a program tells it by.
        message: what a person reads: argument, value, remedy.
        param: the field of the request that it is about.
        error_type: OpenAI's class of it.
    """

    def __init__(
        self,
        status_code: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, dict(headers) if headers else None)
        self.code, self.message, self.param = code, message, param
        self.error_type = _TYPES.get(status_code, "invalid_request_error")

    def body(self) -> Error:
        """The error object."""
        return Error(ErrorObject(self.message, self.error_type, self.param, self.code))

    def response(self) -> Response:
        """As a response."""
        return JsonResponse(self.body(), self.status_code, self.headers)


class JsonResponse(Response):
    """JSON, encoded at once."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status_code, headers)


def refuse(param: str | None, message: str, code: str = "invalid_value") -> NoReturn:
    """Answer 400.

    Raises:
        ApiError: always.
    """
    raise ApiError(400, code, message, param=param)


def from_value_error(error: ValueError) -> ApiError:
    """A 400 from an error of the house, whose text begins with the argument's name."""
    text = _PARAMS.sub("", str(error))
    head = text.split("=", 1)[0].split(" ", 1)[0].split("[", 1)[0].rstrip(":")
    is_name = all(part.isidentifier() for part in head.split("."))
    return ApiError(400, "invalid_value", text, param=head if is_name else None)


def internal_error(error: BaseException, request_id: str | None = None) -> ApiError:
    """A 500 that says where in the log the exception stands."""
    mark = request_id or uuid.uuid4().hex
    logger.error("request %s failed", mark, exc_info=error)
    return ApiError(500, "internal_error", f"The server failed at this request; its log has more under {mark}.")


def api_error(error: HTTPException) -> ApiError:
    """An error of the framework (404, 405, …) as one of ours."""
    if isinstance(error, ApiError):
        return error
    status = error.status_code
    return ApiError(
        status if status != 422 else 400,
        _CODES.get(status, "invalid_value" if status < 500 else "internal_error"),
        str(error.detail) if status < 500 else "The server failed at this request.",
        headers=error.headers,
    )


def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer of the framework's errors."""
    assert isinstance(error, HTTPException)
    found = api_error(error)
    if found.code == "not_found":
        found = ApiError(404, "not_found", f"{request.method} {request.url.path[:200]} is not served; see /docs")
    request.scope.setdefault("state", {})["error_code"] = found.code
    return found.response()


ErrorForm = Callable[[ApiError, str], Any]
"""Makes the error object of an error and the request's id."""


class ErrorMiddleware:
    """Turns what the inner application raises into an answer, and gives every request its id.

    The id is the client's ``x-request-id`` where that is short and printable, else a new one; it goes back in the
    header of that name and is found in ``scope["state"]["request_id"]``; an error's code, in ``["error_code"]``.

    Args:
        app: the inner application.
        forms: prefix of a path → its form of errors; elsewhere it is OpenAI's.
    """

    def __init__(self, app: ASGIApp, forms: Mapping[str, ErrorForm] | None = None) -> None:
        self.app = app
        self._forms = dict(forms or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _given_id(scope) or uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except HTTPException as error:
            if started:
                raise
            found = api_error(error)
            state["error_code"] = found.code
            await self._response(found, scope)(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            state["error_code"] = "internal_error"
            failure = internal_error(error, state["request_id"])
            await self._response(failure, scope)(scope, receive, send_with_id)

    def _response(self, error: ApiError, scope: Scope) -> Response:
        for prefix, form in self._forms.items():
            if scope["path"].removeprefix(scope.get("root_path", "")).startswith(prefix):
                return JsonResponse(form(error, scope["state"]["request_id"]), error.status_code, error.headers)
        return error.response()


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return clean_id(value.decode("latin-1"))
    return None


def clean_id(text: str) -> str | None:
    """``text`` as an id for headers and logs; None if it is none: 1 to 128 printable ASCII characters, no spaces."""
    fits = 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text
    return text if fits else None

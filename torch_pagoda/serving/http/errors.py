"""Errors as OpenAI's error objects; they never contain the text of an unexpected exception."""

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
"""Prefix of the engine's message before the name of a request's field."""

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
    """OpenAI's error details; ``param`` names the field."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct):
    """OpenAI's error object."""

    error: ErrorObject


class ApiError(HTTPException):
    """An error response.

    Attributes:
        code: for programs.
        message: for people: argument, value, remedy.
        param: the field of the request.
        error_type: OpenAI's error type.
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
    """Raise a 400.

    Raises:
        ApiError: always.
    """
    raise ApiError(400, code, message, param=param)


def from_value_error(error: ValueError) -> ApiError:
    """A 400 from one of our errors, whose text begins with the argument's name."""
    text = _PARAMS.sub("", str(error))
    head = text.split("=", 1)[0].split(" ", 1)[0].split("[", 1)[0].rstrip(":")
    is_name = all(part.isidentifier() for part in head.split("."))
    return ApiError(400, "invalid_value", text, param=head if is_name else None)


def internal_error(error: BaseException, request_id: str | None = None) -> ApiError:
    """A 500 that names the id under which the log has the exception."""
    mark = request_id or uuid.uuid4().hex
    logger.error("request %s failed", mark, exc_info=error)
    return ApiError(500, "internal_error", f"Internal server error. See the server log for request {mark}.")


def api_error(error: HTTPException) -> ApiError:
    """An ``ApiError`` for an error of the framework (404, 405, …)."""
    if isinstance(error, ApiError):
        return error
    status = error.status_code
    return ApiError(
        status if status != 422 else 400,
        _CODES.get(status, "invalid_value" if status < 500 else "internal_error"),
        str(error.detail) if status < 500 else "Internal server error.",
        headers=error.headers,
    )


def answer_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for the framework's errors."""
    assert isinstance(error, HTTPException)
    found = api_error(error)
    if found.code == "not_found":
        found = ApiError(404, "not_found", f"{request.method} {request.url.path[:200]} does not exist; see /docs")
    request.scope.setdefault("state", {})["error_code"] = found.code
    return found.response()


ErrorForm = Callable[[ApiError, str], Any]
"""Makes the error object from an error and the request's id."""


class ErrorMiddleware:
    """Turns exceptions of the inner application into error responses, and gives every request its id.

    The id is the client's ``x-request-id`` if that is short and printable, else a new one. It is returned in that
    header and stored in ``scope["state"]["request_id"]``; an error's code is stored in ``["error_code"]``.

    Args:
        app: the inner application.
        forms: path prefix → its error format; other paths use OpenAI's.
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
    """``text`` if it is a valid request id, 1 to 128 printable ASCII characters without spaces; else None."""
    fits = 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text
    return text if fits else None

"""JSON bodies of requests, from untrusted clients, validated as pydantic models."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ...runtime.requests.checks import shown
from .errors import ApiError, refuse

MAX_DEPTH = 64
"""Maximum nesting of objects and lists."""

_Body = TypeVar("_Body", bound=BaseModel)


async def read_body(request: Request, kind: type[_Body]) -> _Body:
    """Parse the body as ``kind``.

    Raises:
        ApiError: 400; invalid JSON, too deeply nested, or invalid fields.
    """
    return validated(decoded(await request.body()), kind)


def decoded(raw: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ApiError: 400.
    """
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        refuse(None, f"The body is nested deeper than {MAX_DEPTH} levels; flatten it.", "invalid_json")
    except ValueError as error:  # msgspec's errors and UnicodeDecodeError
        refuse(None, f"The body is not valid JSON: {str(error)[:200]}", "invalid_json")
    if not isinstance(value, dict):
        refuse(None, f"The body is {_kind(value)}; send a JSON object.", "invalid_json")
    if _is_deeper(value, MAX_DEPTH):
        refuse(None, f"The body is nested deeper than {MAX_DEPTH} levels; flatten it.", "invalid_json")
    return value


def validated(value: dict[str, Any], kind: type[_Body]) -> _Body:
    """Validate ``value`` as ``kind``.

    Raises:
        ApiError: 400 with the first invalid field.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    path = _dotted(first["loc"])
    if first["type"] == "missing":
        raise ApiError(400, "missing_required_parameter", f"{path} is missing; add it", param=path)
    reason = first["msg"].removeprefix("Value error, ")
    raise ApiError(400, "invalid_value", f"{path}={shown(first['input'])}: {reason}", param=path or None)


def _is_deeper(value: Any, depth: int) -> bool:
    """True if lists and objects are nested more than ``depth`` times."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)
        ]
        if not level:
            return False
    return True


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:200]


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")

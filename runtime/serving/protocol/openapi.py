"""OpenAPI's description of routes whose bodies are read by hand."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}

_ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}

_EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}

_ERRORS = {
    400: "A field that cannot be served; code and param say which.",
    401: "No key that this server knows.",
    404: "No such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; come back after Retry-After.",
    500: "The server failed at this request.",
    503: "The model loads, the server shuts down, or the engine has ended.",
    504: "Nothing was generated within the time for it.",
}


def documented(
    body: type[BaseModel] | None,
    summary: str,
    errors: tuple[int, ...] = tuple(_ERRORS),
    *,
    form: Literal["Error", "AnthropicError"] = "Error",
) -> dict[str, Any]:
    """Keywords of a route that say what it takes and answers.

    Args:
        body: its fields; None: it takes none.
        summary: one sentence.
        errors: statuses that it may answer.
        form: of their objects.
    """
    error = {"application/json": {"schema": {"$ref": _REF.format(model=form)}}}
    extra: dict[str, Any] = {}
    answers: dict[int, dict[str, Any]] = {}
    if body is not None and "stream" in body.model_fields:
        kinds: dict[str, Any] = {"application/json": {}, "text/event-stream": {"itemSchema": _EVENT}}
        answers[200] = {"description": "The answer, or its events with stream=true.", "content": kinds}
    if body is not None:
        schema = {"$ref": _REF.format(model=body.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "summary": summary,
        "openapi_extra": extra,
        "response_model": None,
        "responses": {
            **answers,
            **{status: {"description": _ERRORS[status], "content": error} for status in errors},
        },
    }


def describe(app: FastAPI, bodies: tuple[type[BaseModel], ...]) -> None:
    """Make ``app.openapi`` hold the schemas of these bodies and of errors."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            components.update({**found.get("$defs", {}), "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR})
            for name in ("HTTPValidationError", "ValidationError"):
                components.pop(name, None)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation.get("responses", {}).pop("422", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way

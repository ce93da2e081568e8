"""OpenAPI descriptions of routes that read bodies and write responses without FastAPI."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct
from pydantic import BaseModel, TypeAdapter
from starlette.responses import JSONResponse, Response
from typing_extensions import TypeAliasType

from ..generation.stream import DONE
from ..http.errors import Error

_REF = "#/components/schemas/"

_ERRORS = {
    400: "Invalid or unsupported field; see code and param.",
    401: "Missing or invalid API key.",
    404: "No such model.",
    408: "Timed out while reading the request.",
    413: "The body is too large.",
    415: "Unsupported Content-Type.",
    429: "The queue is full; retry after the seconds in Retry-After.",
    500: "Internal server error.",
    503: "The model is loading, the server is shutting down, or the engine has ended.",
    504: "The request reached its deadline before the first token.",
}


class Empty(Struct):
    """The status only."""


def documented(
    body: type[BaseModel] | None,
    summary: str,
    errors: tuple[int, ...] = tuple(_ERRORS),
    *,
    answer: Any = Empty,
    events: TypeAliasType | None = None,
    are_named: bool = False,
    error: Any = Error,
    text_types: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Keyword arguments of a route that describe its body and responses.

    Args:
        body: model of the body; None: no body.
        summary: one sentence.
        errors: statuses of its errors.
        answer: type of its 200 response.
        events: type of its stream's events; None: it does not stream.
        are_named: the events have names, and no ``[DONE]`` follows.
        error: type of its error objects.
        text_types: media types of a text response instead of JSON.
    """
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if text_types:
        content = {kind: {"schema": {"type": "string"}} for kind in text_types}
    if events is not None:
        content["text/event-stream"] = {"itemSchema": _item_schema(events, are_named)}
    streams = ", or its events with stream=true" if events is not None else ""
    answers: dict[int, Any] = {200: {"description": f"The answer{streams}.", "content": content}}
    for status in errors:
        failed = {"application/json": {"schema": _ref(error)}}
        answers[status] = {"description": _ERRORS[status], "content": failed}
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    keywords = {"summary": summary, "openapi_extra": extra, "response_model": None, "responses": answers}
    return {**keywords, "response_class": Response if text_types else JSONResponse}


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": _REF + kind.__name__}


def _item_schema(events: Any, are_named: bool) -> dict[str, Any]:
    """An event of a stream as OpenAPI 3.2 describes one: an object of its fields, whose data is JSON."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(events)}
    if are_named:
        named = {"event": {"type": "string"}, "data": data}
        return {"type": "object", "required": ["event", "data"], "properties": named}
    last = {"const": DONE.decode().removeprefix("data: ").strip()}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [data, last]}}}


def describe(app: FastAPI, bodies: tuple[Any, ...], answers: tuple[Any, ...]) -> None:
    """Add the schemas of these bodies, responses, events and errors to ``app.openapi``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(_schemas_of(bodies, answers))
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation.get("responses", {}).pop("422", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


@cache
def _schemas_of(bodies: tuple[Any, ...], answers: tuple[Any, ...]) -> dict[str, Any]:
    """JSON schemas by the names of types."""
    adapters: list[tuple[Any, Any, TypeAdapter[Any]]] = [(kind, "validation", TypeAdapter(kind)) for kind in bodies]
    _, taken = TypeAdapter.json_schemas(adapters, ref_template=_REF + "{model}")
    unions = [kind for kind in answers if isinstance(kind, TypeAliasType)]
    structs = [kind for kind in answers if kind not in unions]
    structs += [kind for union in unions for kind in get_args(union.__value__)]
    _, sent = msgspec.json.schema_components(structs, ref_template=_REF + "{name}")
    for schema in sent.values():
        _describe_as_sent(schema)
    for union in unions:
        sent[union.__name__] = _any_of([kind.__name__ for kind in get_args(union.__value__)], sent)
    return {**taken["$defs"], **sent}


def _any_of(names: list[str], schemas: dict[str, Any]) -> dict[str, Any]:
    """One of these schemas, discriminated by ``type`` if they have that field."""
    union: dict[str, Any] = {"anyOf": [{"$ref": _REF + name} for name in names]}
    types = {name: schemas[name]["properties"].get("type", {}).get("enum", ()) for name in names}
    if mapping := {value: _REF + name for name in names for value in types[name]}:
        union["discriminator"] = {"propertyName": "type", "mapping": mapping}
    return union


def _describe_as_sent(schema: dict[str, Any]) -> None:
    """Convert msgspec's input schema to the output's: fields with defaults are always present."""
    fields = schema["properties"]
    schema["required"] = [name for name in fields if name in schema["required"] or "default" in fields[name]]
    for field in fields.values():
        field.pop("default", None)
        for option in field.get("anyOf", [field]):
            if "enum" in option:
                option["type"] = "string"

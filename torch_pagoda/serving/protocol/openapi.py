"""OpenAPI's description of routes whose bodies are read, and whose answers are made, by hand."""

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


class Empty(Struct):
    """Nothing but the status."""


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
    """Keywords of a route that say what it takes and answers.

    Args:
        body: its fields; None: it takes none.
        summary: one sentence.
        errors: statuses that it may answer.
        answer: the type of what it answers with 200.
        events: the type of what a stream's events hold; None: it does not stream.
        are_named: the events have names, and end without ``[DONE]``.
        error: the type of its error objects.
        text_types: media types of its answer where that is text and no JSON.
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
    """Make ``app.openapi`` hold the schemas of these bodies, and of these answers, events and errors."""

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
    """One of these schemas, told apart by ``type`` where they have that field."""
    union: dict[str, Any] = {"anyOf": [{"$ref": _REF + name} for name in names]}
    types = {name: schemas[name]["properties"].get("type", {}).get("enum", ()) for name in names}
    if mapping := {value: _REF + name for name in names for value in types[name]}:
        union["discriminator"] = {"propertyName": "type", "mapping": mapping}
    return union


def _describe_as_sent(schema: dict[str, Any]) -> None:
    """Make the schema of what msgspec reads one of what it writes: fields with defaults are never left out."""
    fields = schema["properties"]
    schema["required"] = [name for name in fields if name in schema["required"] or "default" in fields[name]]
    for field in fields.values():
        field.pop("default", None)
        for option in field.get("anyOf", [field]):
            if "enum" in option:
                option["type"] = "string"

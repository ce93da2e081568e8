"""What a server's OpenAPI document says of an answer, held against the answer."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
from fastapi import FastAPI
from jsonschema import Draft202012Validator


class Described:
    """An OpenAPI document, as a judge of answers.

    What is sent must be described, too: objects whose properties are listed have no others here, though the
    document itself lets clients expect some.

    Args:
        document: ``/openapi.json``.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.paths = {re.compile(re.sub(r"\{\w+\}", ".+", path)): each for path, each in document["paths"].items()}
        self._components = {"components": {"schemas": _closed(document["components"]["schemas"])}}
        self._validators: dict[str, Draft202012Validator] = {}

    def wrong_with(self, method: str, path: str, status: int, content_type: str, body: bytes) -> str | None:
        """What is not as described; None if all is, or if the path is not in the document."""
        found = [each for pattern, each in self.paths.items() if pattern.fullmatch(path)]
        operation = found[0].get(method.lower()) if found else None
        if operation is None:
            return None
        described = operation["responses"].get(str(status))
        if described is None:
            return f"status {status} is not described"
        content = described["content"].get(content_type.split(";")[0])
        if content is None:
            return f"status {status} with {content_type} is not described"
        try:
            if "itemSchema" in content:
                for event in stream_events(body.decode()):
                    self._check_event(event, content["itemSchema"])
            elif content_type.startswith("application/json"):
                self._check(json.loads(body), content["schema"])
        except (jsonschema.ValidationError, ValueError) as error:
            return f"{error}"
        return None

    def _check_event(self, event: dict[str, str], schema: dict[str, Any]) -> None:
        self._check(event, schema)
        data = schema["properties"]["data"]
        options = data.get("anyOf", [data])
        if event["data"] in [option.get("const") for option in options]:
            return
        value = json.loads(event["data"])
        self._check(value, options[0]["contentSchema"])
        if "event" in schema["properties"] and event["event"] != value["type"]:
            raise ValueError(f"an event {event['event']} holds a {value['type']}")

    def _check(self, value: Any, schema: dict[str, Any]) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = Draft202012Validator({**schema, **self._components})
        self._validators[key].validate(value)


def stream_events(text: str) -> list[dict[str, str]]:
    """Fields of the events of a stream, without comments."""
    events: list[dict[str, str]] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            events.append(dict(line.split(": ", 1) for line in lines))  # type: ignore[misc]
    return events


def _closed(schemas: Any) -> Any:
    """The schemas, with no other properties in objects than those that are listed."""
    if isinstance(schemas, list):
        return [_closed(each) for each in schemas]
    if not isinstance(schemas, dict):
        return schemas
    closed = {name: _closed(each) for name, each in schemas.items()}
    if schemas.get("type") == "object" and "properties" in schemas:
        closed["additionalProperties"] = False
    return closed


_KNOWN: dict[bool, Described] = {}


class JudgingTransport(httpx.AsyncBaseTransport):
    """Answers of an application in this process, each held against the application's document.

    Args:
        app: that answers.
        transport: to it.
    """

    def __init__(self, app: FastAPI, transport: httpx.AsyncBaseTransport) -> None:
        self.app, self._transport = app, transport
        is_admin = app.state.front.settings.enable_admin
        if is_admin not in _KNOWN:
            _KNOWN[is_admin] = Described(app.openapi())
        self.described = _KNOWN[is_admin]
        """Made once for all applications with the same routes."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer, or say what of the answer is not described."""
        response = await self._transport.handle_async_request(request)
        body = await response.aread()
        path, kind = request.url.path, response.headers.get("content-type", "")
        wrong = self.described.wrong_with(request.method, path, response.status_code, kind, body)
        assert wrong is None, f"{request.method} {path}: {response.status_code} {body[:500]!r}: {wrong}"
        return httpx.Response(response.status_code, headers=response.headers, content=body, request=request)

"""``GET /docs``: the routes and their fields on one page, without external resources."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code{font-family:ui-monospace,monospace}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8884}"
)

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}


def docs_router(app: FastAPI) -> APIRouter:
    """The route; ``/openapi.json`` has the same content."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_page(app.openapi()), headers=_HEADERS)

    return router


def _page(schema: dict[str, Any]) -> str:
    schemas = schema.get("components", {}).get("schemas", {})
    parts = []
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
            )
            content = operation.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            fields = schemas.get(reference.rpartition("/")[2], {})
            if fields.get("properties"):
                parts.append(_table(fields))
    title = escape(schema["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1><p>Version {escape(schema['info']['version'])}; machine-readable: "
        f"<code>/openapi.json</code>.</p>{''.join(parts)}</body></html>"
    )


def _table(fields: dict[str, Any]) -> str:
    required = fields.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}{' (needed)' * (name in required)}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in fields["properties"].items()
    ]
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{''.join(rows)}</table>"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"] if option.get("type") != "null")
    kind = str(field.get("type", "any"))
    return f"{kind} of {_type(field['items'])}" if kind == "array" and "items" in field else kind

"""Unsupported endpoints of other servers, with the reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from ..http.errors import ApiError

_HIDDEN_STATES = "it needs hidden states, which this server does not return"
_TEXT_ONLY = "this server reads and writes text only"
_STATELESS = "this server keeps no state between requests"

UNSERVED = {
    "/v1/embeddings": _HIDDEN_STATES,
    "/embeddings": _HIDDEN_STATES,
    "/pooling": _HIDDEN_STATES,
    "/classify": _HIDDEN_STATES,
    "/score": _HIDDEN_STATES,
    "/v1/score": _HIDDEN_STATES,
    "/rerank": _HIDDEN_STATES,
    "/v1/rerank": _HIDDEN_STATES,
    "/v2/rerank": _HIDDEN_STATES,
    "/v1/moderations": _HIDDEN_STATES,
    "/v1/audio/{rest:path}": _TEXT_ONLY,
    "/v1/images/{rest:path}": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/files": _STATELESS,
    "/v1/batches": _STATELESS,
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/fine_tuning/{rest:path}": "this server does not train models",
    "/v1/load_lora_adapter": "adapters are not supported",
    "/v1/unload_lora_adapter": "adapters are not supported",
}
"""Path → reason."""


def unserved_router() -> APIRouter:
    """The routes, each of which answers 404 ``not_supported``."""
    router = APIRouter()
    for path, reason in UNSERVED.items():
        router.add_api_route(
            path,
            _refusal(path.partition("{")[0], reason),
            methods=["GET", "POST", "DELETE"],
            include_in_schema=False,
            response_model=None,
        )
    return router


def _refusal(path: str, reason: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(404, "not_supported", f"{path} is not supported: {reason}")

    return refuse

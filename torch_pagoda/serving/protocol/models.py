"""``GET /v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter
from msgspec import Struct
from starlette.responses import Response

from ..generation.front import Front
from ..generation.usage import Count
from ..http.errors import JsonResponse
from .openapi import documented


class Capabilities(Struct):
    """Capabilities of a model beyond completions."""

    chat: bool
    tools: bool


class Model(Struct, kw_only=True):
    """The model under one of its names."""

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "pagoda"
    root: str
    parent: None = None
    max_model_len: Count
    capabilities: Capabilities


class Models(Struct, kw_only=True):
    """Response of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[Model]


def models_router(front: Front) -> APIRouter:
    """The routes."""
    router = APIRouter()
    created = int(time.time())

    def entry(name: str) -> Model:
        calls_tools = front.formats is not None and front.formats.calls_tools
        return Model(
            id=name,
            created=created,
            root=front.settings.model_name,
            max_model_len=front.client.hello.max_model_len,
            capabilities=Capabilities(front.prompts.has_template, calls_tools),
        )

    @router.get("/v1/models", **documented(None, "List the model under all its names.", (401, 503), answer=Models))
    async def models() -> Response:
        front.admission.check_loaded()
        return JsonResponse(Models(data=[entry(name) for name in front.settings.served_model_names]))

    @router.get(
        "/v1/models/{model:path}",
        **documented(None, "Get the model under one of its names.", (401, 404, 503), answer=Model),
    )
    async def model(model: str) -> Response:
        front.admission.check_loaded()
        return JsonResponse(entry(front.model_name(model)))

    return router

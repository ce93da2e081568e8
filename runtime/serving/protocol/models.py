"""``GET /v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from ..generation.front import Front
from .answer_schemas import Model, Models
from .openapi import documented


def models_router(front: Front) -> APIRouter:
    """The routes."""
    router = APIRouter()
    created = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        settings, hello = front.settings, front.client.hello
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pagoda",
            "root": settings.model_name,
            "parent": None,
            "max_model_len": hello.max_model_len,
            "capabilities": {
                "chat": front.prompts.has_template,
                "tools": front.formats is not None and front.formats.calls_tools,
            },
        }

    @router.get("/v1/models", **documented(None, "The model under all of its names.", (401, 503), answer=Models))
    async def models() -> dict[str, Any]:
        front.admission.check_loaded()
        return {"object": "list", "data": [entry(name) for name in front.settings.served_model_names]}

    @router.get(
        "/v1/models/{model:path}",
        **documented(None, "The model under one of its names.", (401, 404, 503), answer=Model),
    )
    async def model(model: str) -> dict[str, Any]:
        front.admission.check_loaded()
        return entry(front.model_name(model))

    return router

"""Routes for the server's operator, behind ``--enable-admin``."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from ..engine_process.client import EngineUnavailable
from ..generation.admission import of_unavailable
from ..generation.front import Front
from ..generation.usage import Count
from ..http.errors import ApiError, JsonResponse
from .openapi import Empty, documented


class ServerInfo(msgspec.Struct):
    """Response of ``GET /server_info``; ``tasks`` counts the API process's asyncio tasks."""

    settings: dict[str, Any]
    engine: dict[str, Any]
    stats: dict[str, Any]
    tasks: Count


def admin_router(front: Front) -> APIRouter:
    """``GET /server_info`` and ``POST /reset_prefix_cache``."""
    router = APIRouter()

    @router.get("/server_info", **documented(None, "Settings, model and statistics.", (401, 503), answer=ServerInfo))
    async def server_info() -> Response:
        front.admission.check_loaded()
        settings = asdict(front.settings)
        settings["api_keys"] = [key.name for key in front.settings.api_keys]
        engine = msgspec.structs.asdict(front.client.hello)
        return JsonResponse(ServerInfo(settings, engine, dict(front.client.stats), len(asyncio.all_tasks())))

    @router.post("/reset_prefix_cache", **documented(None, "Reset the prefix cache.", (401, 415, 503, 504)))
    async def reset_prefix_cache() -> Response:
        try:
            await front.client.ask("reset_prefix_cache")
        except EngineUnavailable as error:
            raise of_unavailable(error) from error
        except TimeoutError as error:
            raise ApiError(504, "deadline_exceeded", "The engine did not answer in time.") from error
        return JsonResponse(Empty())

    return router

"""State of the server, for load balancers, scrapers and people."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from msgspec import Meta, Struct
from starlette.responses import Response

from ..generation.admission import unavailable
from ..generation.front import Front
from ..generation.usage import Count
from ..http.errors import JsonResponse
from .openapi import Empty, documented


class Version(Struct):
    """Response of ``GET /version``."""

    version: str


class Load(Struct):
    """Response of ``GET /load``: requests, running and waiting completions, and the share of blocks in use."""

    server_load: Count
    running: Count
    waiting: Count
    kv_cache_usage: Annotated[float, Meta(ge=0, le=1)]


def health_router(front: Front) -> APIRouter:
    """``/health``, ``/healthz``, ``/ready``, ``/ping``, ``/version`` and ``/load``."""
    router = APIRouter()

    def check() -> None:
        front.admission.check_loaded()
        silence = front.client.seconds_since_heard
        if silence > front.settings.engine_silence:
            raise unavailable("engine_silent", f"The engine has not responded for {silence:.0f} s.", 10)

    @router.get("/healthz", **documented(None, "The same as /health.", (503,)))
    @router.get("/health", **documented(None, "200 while the engine works.", (503,)))
    async def health() -> Response:
        check()
        return JsonResponse(Empty())

    @router.get("/ready", **documented(None, "200 while the server accepts requests.", (503,)))
    async def ready() -> Response:
        front.admission.check_open()
        check()
        return JsonResponse(Empty())

    @router.post("/ping", **documented(None, "The same as /health, for SageMaker.", (401, 415, 503)))
    @router.get("/ping", **documented(None, "The same as /health, for SageMaker.", (503,)))
    async def ping() -> Response:
        check()
        return JsonResponse(Empty())

    @router.get("/version", **documented(None, "Version of the server.", (), answer=Version))
    async def version() -> Response:
        return JsonResponse(Version(front.settings.version))

    @router.get("/load", **documented(None, "The current load.", (401,), answer=Load))
    async def load() -> Response:
        stats = front.client.stats
        total = stats.get("blocks_total", 0)
        return JsonResponse(
            Load(
                server_load=front.admission.num_requests,
                running=int(stats.get("running", 0)),
                waiting=int(stats.get("queue_length", 0)),
                kv_cache_usage=stats.get("blocks_used", 0) / total if total else 0.0,
            )
        )

    return router

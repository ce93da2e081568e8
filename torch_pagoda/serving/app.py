"""The ASGI application: routes around one engine, with API keys, limits and errors in OpenAI's form."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .engine_process.client import EngineClient
from .formats.registry import AnyFormat, resolve
from .generation.front import Front
from .generation.gate import GateMiddleware
from .http.auth import OPEN_PATHS, AuthMiddleware
from .http.errors import ApiError, Error, ErrorMiddleware, answer_http_exception
from .http.limits import BodyMiddleware, HostMiddleware
from .http.paths import PathMiddleware
from .monitoring.logs import RequestLog
from .monitoring.metrics import ServerMetrics, metrics_endpoint
from .monitoring.tracing import RequestTracer
from .page.chat_page import chat_page_router, page_paths
from .protocol.admin import ServerInfo, admin_router
from .protocol.chat import ChatCompletion, ChatEvents, chat_router
from .protocol.completions import Completion, CompletionEvents, completions_router
from .protocol.docs import docs_router
from .protocol.fields import ChatBody, CompletionBody
from .protocol.health import Load, Version, health_router
from .protocol.message_events import AnthropicError, AnthropicMessage, MessageEvents, anthropic_error
from .protocol.messages import CountTokensBody, InputTokens, MessagesBody, messages_router
from .protocol.models import Model, Models, models_router
from .protocol.openapi import Empty, describe, documented
from .protocol.response_events import ResponseEvents, ResponseObject
from .protocol.responses import ResponsesBody, responses_router
from .protocol.tokenize import DetokenizeBody, TokenizeBody, Tokens, TokensText, tokenize_router
from .protocol.unserved import unserved_router
from .settings import Settings

_REFUSALS = frozenset({401, 408, 413, 429, 503, 504})


def make_app(
    settings: Settings,
    client: EngineClient,
    tokenizer: Any,
    *,
    formats: AnyFormat | None = None,
    log: RequestLog | None = None,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """The ASGI application of one server; ``app.state.front`` is its ``Front``.

    Args:
        settings: the server's settings.
        client: the server's engine, which may still be loading.
        tokenizer: a HuggingFace tokenizer; None: prompts are token ids.
        formats: the formats of tool calls and reasoning.
        log, tracer: receive every finished request.
    """
    front = Front(settings, client, tokenizer, formats=formats, log=log, tracer=tracer)
    app = FastAPI(
        title=f"pagoda: {settings.model_name}",
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        exception_handlers={HTTPException: _reraise, RequestValidationError: _invalid},
        redirect_slashes=False,
    )
    app.state.front = front
    for router in (
        *(completions_router, chat_router, responses_router, messages_router),
        *(models_router, tokenize_router, health_router),
    ):
        app.include_router(router(front))
    figures = documented(
        None, "Metrics for Prometheus.", (401,), text_types=("text/plain", "application/openmetrics-text")
    )
    app.add_api_route("/metrics", metrics_endpoint(front.metrics), **figures)
    if settings.enable_admin:
        app.include_router(admin_router(front))
    app.include_router(unserved_router())
    app.include_router(docs_router(app))
    open_paths = OPEN_PATHS if settings.protect_metrics else OPEN_PATHS | {"/metrics"}
    if settings.enable_ui:
        app.include_router(chat_page_router(front.renderer))
        open_paths |= {path for path, _ in page_paths()}
    bodies = (CompletionBody, ChatBody, ResponsesBody, MessagesBody, CountTokensBody, TokenizeBody, DetokenizeBody)
    answers = (
        *(Completion, CompletionEvents, ChatCompletion, ChatEvents, ResponseObject, ResponseEvents),
        *(AnthropicMessage, MessageEvents, InputTokens, Tokens, TokensText, Models, Model),
        *(Version, Load, ServerInfo, Empty, Error, AnthropicError),
    )
    describe(app, bodies, answers)

    # The last one added is the outermost.
    app.add_middleware(GateMiddleware, front=front)
    app.add_middleware(BodyMiddleware, max_size=settings.max_body_size, timeout=settings.body_timeout)
    app.add_middleware(AuthMiddleware, keys=settings.api_keys, open_paths=open_paths)
    if settings.is_loopback and settings.uds is None:
        app.add_middleware(HostMiddleware, allowed=settings.allowed_hosts)
    app.add_middleware(ErrorMiddleware, forms={"/v1/messages": anthropic_error})
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # of an allowed origin: clients send many of their own
            expose_headers=["x-request-id", "x-pagoda-ignored", "retry-after"],
        )
    app.add_middleware(ObserveMiddleware, metrics=front.metrics)
    app.add_middleware(PathMiddleware)
    return app


def load_formats(settings: Settings, tokenizer: Any) -> AnyFormat | None:
    """The formats of tool calls and reasoning that the settings name, or that the chat template shows.

    Raises:
        ValueError: a name is not known.
    """
    if tokenizer is None or (settings.chat_template is None and not getattr(tokenizer, "chat_template", None)):
        return None
    tools, reasoning = settings.tool_call_parser, settings.reasoning_parser
    return resolve(tools, tokenizer, settings.chat_template, reasoning_parser=reasoning)


class ObserveMiddleware:
    """Counts responses and refusals."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        begin = time.monotonic()
        status = 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        finally:
            handler = getattr(scope.get("route"), "path", None) or state.get("handler")
            self._metrics.observe_http(handler, scope["method"], status or 499, time.monotonic() - begin)
            if status in _REFUSALS:
                self._metrics.refused(state.get("error_code") or "other")


async def _reraise(request: Request, error: Exception) -> Response:
    """Raise the error, so that ``ErrorMiddleware`` answers as it does for the middlewares."""
    if isinstance(error, ApiError):
        raise error
    return answer_http_exception(request, error)


async def _invalid(request: Request, error: Exception) -> Response:
    raise ApiError(400, "invalid_value", "The request does not match this route's schema; see /docs")

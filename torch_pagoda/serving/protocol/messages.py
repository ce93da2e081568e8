"""Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``, converted to chat requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter
from msgspec import Struct
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ...runtime.requests.checks import shown
from ..generation.front import Front
from ..generation.prompts import check_counted
from ..generation.usage import Count
from ..http.errors import JsonResponse, refuse
from ..http.json_body import read_body, validated
from . import chat
from .chat_request import prompt_of, tools_of
from .fields import ChatBody, RequestBody, ShortTexts, Whole
from .generation_route import Prepared, respond
from .message_blocks import chat_messages, chat_tool_choice, chat_tools
from .message_events import AnthropicError, AnthropicMessage, MessageAnswer, MessageEvents
from .openapi import documented

_SAME_NAME = (
    *("temperature", "top_p", "top_k", "stream"),
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop_token_ids"),
    *("ignore_eos", "min_tokens", "logit_bias", "structured_outputs", "chat_template_kwargs"),
    *("priority", "cache_salt", "timeout"),
)
"""Fields with the same name in chat requests; those after the first line are our extensions there, too."""

_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


class CountTokensBody(RequestBody):
    """Body of ``POST /v1/messages/count_tokens``."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000)
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    accepted: ClassVar[frozenset[str]] = frozenset(
        {*_SAME_NAME, "service_tier", "cache_control", "context_management", "anthropic_beta", "speed"}
        | {"inference_geo", "diagnostics", "user_profile_id", "workspace_id"}
    )
    refused: ClassVar[dict[str, str]] = {
        "container": "this server runs no tools; omit it",
        "mcp_servers": "call them yourself and send their tools",
    }


class MessagesBody(CountTokensBody):
    """Body of ``POST /v1/messages``."""

    max_tokens: Whole = Field(ge=1)
    metadata: dict[str, Any] | None = None
    stop_sequences: ShortTexts | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    stream: bool | None = None


class InputTokens(Struct):
    """Response of ``POST /v1/messages/count_tokens``."""

    input_tokens: Count


def messages_router(front: Front) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post(
        "/v1/messages",
        **documented(
            MessagesBody,
            "Generate the next message of a conversation, in Anthropic's form.",
            answer=AnthropicMessage,
            events=MessageEvents,
            are_named=True,
            error=AnthropicError,
        ),
    )
    async def messages(request: Request) -> Response:
        return await respond(front, request, MessagesBody, prepare)

    @router.post(
        "/v1/messages/count_tokens",
        **documented(
            CountTokensBody, "Count the tokens of a conversation.", answer=InputTokens, error=AnthropicError
        ),
    )
    async def count_tokens(request: Request) -> Response:
        front.admission.check_loaded()
        body = await read_body(request, CountTokensBody)
        front.model_name(body.model)
        asked, places = as_chat(body)
        tools, _ = tools_of(front, asked)
        declarations = [dict(tool.declaration) for tool in tools] or None
        max_model_len = front.client.hello.max_model_len
        prompt = await prompt_of(front, asked, declarations, max_model_len, places=places)
        check_counted(prompt.token_ids, max_model_len, "messages")
        return JsonResponse(InputTokens(len(prompt.token_ids)))

    return router


async def prepare(front: Front, request: Request, body: MessagesBody, model: str) -> Prepared:
    """Convert the request to a generation, by way of the equivalent chat request.

    ``max_tokens`` is an upper bound: if the context leaves less, that is used.

    Raises:
        ApiError: 400.
    """
    asked, places = as_chat(body)
    prepared = await chat.prepare(front, request, asked, model, places=places)
    ask = prepared.ask
    room = front.client.hello.max_model_len - len(ask.prompts[0].token_ids)
    params = {**ask.params, "max_tokens": min(body.max_tokens, room)}
    ask = replace(ask, id=f"msg_{ask.id.partition('-')[2]}", params=params)
    return replace(
        prepared,
        ask=ask,
        renderer=lambda generation: MessageAnswer(generation, model, body.max_tokens > room),
    )


def as_chat(body: CountTokensBody) -> tuple[ChatBody, list[str]]:
    """The equivalent chat request, without a limit on its tokens, and the field names of its messages.

    Raises:
        ApiError: 400.
    """
    extra = body.model_extra or {}
    config, choice = body.output_config or {}, body.tool_choice or {}
    fields = {name: getattr(body, name, extra.get(name)) for name in _SAME_NAME}
    messages, places = chat_messages(body.messages, body.system)
    fields |= {
        "messages": messages,
        "tools": chat_tools(body.tools or []) or None,
        "tool_choice": chat_tool_choice(body.tool_choice),
        "reasoning_effort": config.get("effort"),
        "response_format": _response_format(config.get("format")),
    }
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if body.messages[-1].get("role") == "assistant":
        fields["continue_final_message"] = True
    if (thinks := _thinks(body.thinking)) is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinks, **(fields["chat_template_kwargs"] or {})}
    if isinstance(body, MessagesBody):
        fields["stop"] = body.stop_sequences or None
        fields["user"] = (body.metadata or {}).get("user_id")
    return validated({name: value for name, value in fields.items() if value is not None}, ChatBody), places


def _thinks(thinking: dict[str, Any] | None) -> bool | None:
    if thinking is None:
        return None
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        refuse("thinking.type", f"thinking.type={shown(kind)} is not known; use enabled, adaptive or disabled")
    return _THINKING[kind]


def _response_format(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema" or not isinstance(value.get("schema"), dict):
        text = (
            f"output_config.format={shown(value)} is not supported; use {{'type': 'json_schema', 'schema': {{...}}}}"
        )
        refuse("output_config.format", text)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": value["schema"]}}

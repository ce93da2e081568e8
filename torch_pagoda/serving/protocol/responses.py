"""``POST /v1/responses``, stateless: converted to a chat request."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ...runtime.requests.checks import shown
from ..generation.front import Front
from ..generation.generate import Ask
from ..http.errors import ApiError, refuse
from ..http.json_body import validated
from . import chat
from .fields import ChatBody, RequestBody, Whole
from .generation_route import Prepared, respond
from .openapi import documented
from .response_events import ReasoningSettings, ResponseAnswer, ResponseEvents, ResponseObject, TextSettings
from .response_items import chat_tool_choice, chat_tools, input_messages, response_format

_SAME_NAME = (
    *("temperature", "top_p", "parallel_tool_calls", "user", "stream"),
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *("stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "structured_outputs", "chat_template_kwargs"),
    *("priority", "cache_salt", "timeout"),
)
"""Fields with the same name in chat requests; those after the first line are our extensions there, too."""

_ANSWERED_ANYWAY = frozenset({"reasoning.encrypted_content"})
"""Values of ``include`` that clients send by default; they have no effect here."""

_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of chat request fields → names here."""


class ResponsesBody(RequestBody):
    """Body of ``POST /v1/responses``."""

    input: Any = Field(
        ...,
        description="Text, or items: messages, reasoning, function calls and their outputs.",
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "object"}, "minItems": 1},
            ]
        },
    )
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Whole | None = Field(None, ge=0)
    stream: bool | None = None
    store: bool | None = Field(None, description="Treated as false: this server stores nothing.")
    background: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = Field(None, max_length=64)
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    accepted: ClassVar[frozenset[str]] = frozenset(
        {*_SAME_NAME, "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"max_tool_calls", "stream_options", "client_metadata"}
    )
    refused: ClassVar[dict[str, str]] = {
        "conversation": "this server stores nothing; send the whole conversation as input",
        "prompt": "this server stores nothing; send instructions and input",
    }


def responses_router(front: Front) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post(
        "/v1/responses",
        **documented(
            ResponsesBody,
            "Generate the next turn of a conversation that the client stores.",
            answer=ResponseObject,
            events=ResponseEvents,
            are_named=True,
        ),
    )
    async def responses(request: Request) -> Response:
        return await respond(front, request, ResponsesBody, prepare)

    return router


async def prepare(front: Front, request: Request, body: ResponsesBody, model: str) -> Prepared:
    """Convert the request to a generation, by way of the equivalent chat request.

    Raises:
        ApiError: 400.
    """
    _check_stateless(body)
    try:
        asked, places = as_chat(body)
        prepared = await chat.prepare(front, request, asked, model, name="input", places=places)
    except ApiError as error:
        raise _renamed(error) from error
    ask = replace(prepared.ask, id=f"resp_{prepared.ask.id.partition('-')[2]}")
    return replace(
        prepared, ask=ask, renderer=lambda generation: ResponseAnswer(generation, _begun(body, model, ask))
    )


def as_chat(body: ResponsesBody) -> tuple[ChatBody, list[str]]:
    """The equivalent chat request, and the field names of its messages.

    Raises:
        ApiError: 400.
    """
    reasoning, extra = body.reasoning or {}, body.model_extra or {}
    fields = {name: getattr(body, name, extra.get(name)) for name in _SAME_NAME}
    messages, places = input_messages(body.input, body.instructions)
    fields |= {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": chat_tools(body.tools or []) or None,
        "tool_choice": chat_tool_choice(body.tool_choice),
        "response_format": response_format(body.text),
        "reasoning_effort": reasoning.get("effort"),
    }
    if reasoning.get("effort") == "none":
        fields["chat_template_kwargs"] = {"enable_thinking": False, **(fields["chat_template_kwargs"] or {})}
    return validated({name: value for name, value in fields.items() if value is not None}, ChatBody), places


def _check_stateless(body: ResponsesBody) -> None:
    if body.previous_response_id is not None:
        text = (
            "previous_response_id is not supported: this server stores nothing; send the whole conversation as input"
        )
        refuse("previous_response_id", text, "unsupported_parameter")
    if body.background:
        refuse("background", "background=true is not supported; wait for the response", "unsupported_parameter")
    if body.truncation not in (None, "auto", "disabled"):
        refuse("truncation", f"truncation={shown(body.truncation)} is not known; use 'auto' or 'disabled'")
    if body.top_logprobs:
        refuse(
            "top_logprobs", "top_logprobs is not supported here; use /v1/chat/completions", "unsupported_parameter"
        )
    for name in body.include or ():
        if name not in _ANSWERED_ANYWAY:
            refuse("include", f"include={shown(name)} is not supported; omit it", "unsupported_parameter")


def _renamed(error: ApiError) -> ApiError:
    """The error with the field's name in this API."""
    head, bracket, rest = (error.param or "").partition("[")
    param = _PARAMS.get(head, head) + bracket + rest if error.param else None
    return ApiError(error.status_code, error.code, error.message, param=param, headers=error.headers)


def _begun(body: ResponsesBody, model: str, ask: Ask) -> ResponseObject:
    """The response at its beginning, with the requested or default settings."""
    return ResponseObject(
        id=ask.id,
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ReasoningSettings((body.reasoning or {}).get("effort")),
        temperature=ask.params.get("temperature", 1.0),
        text=TextSettings((body.text or {}).get("format") or {"type": "text"}),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=ask.params.get("top_p", 1.0),
        user=body.user,
    )

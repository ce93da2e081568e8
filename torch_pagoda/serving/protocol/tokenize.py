"""``POST /tokenize`` and ``/detokenize``, with vLLM's bodies."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from msgspec import Struct
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..generation.front import Front
from ..generation.prompts import check_counted, checked_ids
from ..generation.usage import Count, Ids
from ..http.errors import JsonResponse, refuse
from ..http.json_body import read_body
from .chat_request import prompt_of
from .fields import Body, ChatBody
from .openapi import documented

_ERRORS = (400, 401, 404, 408, 413, 415, 503)


class TokenizeBody(Body):
    """Body of ``POST /tokenize``: a text, or a conversation."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=10_000)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = Field(None, max_length=256)
    tokens: list[int] = Field(max_length=2**20)


class Tokens(Struct):
    """Response of ``POST /tokenize``; texts of the tokens only if requested."""

    count: Count
    max_model_len: Count
    tokens: Ids
    token_strs: list[str] | None


class TokensText(Struct):
    """Response of ``POST /detokenize``."""

    prompt: str


def tokenize_router(front: Front) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post(
        "/tokenize", **documented(TokenizeBody, "Tokenize a text or a conversation.", _ERRORS, answer=Tokens)
    )
    async def tokenize(request: Request) -> Response:
        front.admission.check_loaded()
        body = await read_body(request, TokenizeBody)
        front.model_name(body.model)
        hello = front.client.hello
        if (body.prompt is None) == (body.messages is None):
            refuse("prompt", "prompt and messages are mutually exclusive; send one of them")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            token_ids = await front.prompts.tokens(body.prompt, hello.max_model_len, special, "prompt")
        else:
            names = set(ChatBody.model_fields) & set(TokenizeBody.model_fields) - {"tools"}
            asked = ChatBody(**{name: getattr(body, name) for name in names})
            token_ids = (await prompt_of(front, asked, body.tools, hello.max_model_len)).token_ids
        check_counted(token_ids, hello.max_model_len, "messages" if body.prompt is None else "prompt")
        texts = front.tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        return JsonResponse(Tokens(len(token_ids), hello.max_model_len, token_ids, texts))

    @router.post("/detokenize", **documented(DetokenizeBody, "Detokenize token ids.", _ERRORS, answer=TokensText))
    async def detokenize(request: Request) -> Response:
        front.admission.check_loaded()
        body = await read_body(request, DetokenizeBody)
        front.model_name(body.model)
        if front.tokenizer is None:
            refuse("tokens", "the model has no tokenizer, so its tokens have no text")
        tokens = checked_ids(body.tokens, front.client.hello.vocab_size, "tokens") if body.tokens else []
        return JsonResponse(TokensText(await front.prompts.decode(tokens) if tokens else ""))

    return router

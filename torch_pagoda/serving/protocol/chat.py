"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypeAliasType

from ...runtime.requests.checks import shown
from ..engine_process.wire import TokenLogprob
from ..formats.events import ToolCall
from ..formats.format import AnswerParser, Format
from ..formats.registry import AnyFormat
from ..generation.front import Front, key_name
from ..generation.generate import Ask, ChoiceEnd, Generation, Piece, StopReason
from ..generation.logprobs import ChatTokenLogprob, PromptLogprobs, chat_logprobs, prompt_logprobs
from ..generation.prompts import check_room, truncated
from ..generation.usage import Count, Ids, Usage, UsageSoFar
from ..http.errors import Error, refuse
from .answers import Answer, Generated
from .chat_request import call_grammar, may_reason, prompt_of, reasoning_ahead, tools_of
from .fields import ChatBody
from .generation_route import Prepared, respond
from .openapi import documented
from .sampling import request_options, sampling_params


class CalledFunction(Struct):
    """A function and its arguments, as the text of a JSON object."""

    name: str
    arguments: str


class CalledTool(Struct, kw_only=True):
    """A call."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledToolChunk(Struct, kw_only=True):
    """A call with its index among those of the choice."""

    index: Count
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatLogprobs(Struct):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(Struct, kw_only=True):
    """The assistant's message; its reasoning has two names."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Struct):
    """A message."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChoiceEnd
    stop_reason: StopReason
    token_ids: Ids | UnsetType = UNSET


class ChatCompletion(Generated, kw_only=True):
    """Response of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: Ids | UnsetType = UNSET


class ChatDelta(Struct):
    """The new part of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CalledToolChunk] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A piece of a message."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: Ids | UnsetType = UNSET
    prompt_token_ids: Ids | UnsetType = UNSET


class ChatCompletionChunk(Generated, kw_only=True):
    """Event of ``POST /v1/chat/completions``; the event with the usage has no choices."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: UsageSoFar | UnsetType | None = UNSET


ChatEvents = TypeAliasType("ChatEvents", ChatCompletionChunk | Error)


def chat_router(front: Front) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        **documented(
            ChatBody, "Generate the next message of a conversation.", answer=ChatCompletion, events=ChatEvents
        ),
    )
    async def chat(request: Request) -> Response:
        return await respond(front, request, ChatBody, prepare)

    return router


async def prepare(
    front: Front,
    request: Request,
    body: ChatBody,
    model: str,
    *,
    name: str = "messages",
    places: list[str] | None = None,
) -> Prepared:
    """Convert the request to a generation.

    Args:
        front, request, body, model: of the request.
        name, places: field names of the conversation and its messages, for errors; see ``prompt_of``.

    Raises:
        ApiError: 400.
    """
    hello, settings = front.client.hello, front.settings
    if body.modalities not in (None, ["text"]):
        refuse(
            "modalities",
            f"modalities={shown(body.modalities)} are not supported; use ['text']",
            "unsupported_parameter",
        )
    if body.top_logprobs is not None and not body.logprobs:
        refuse("top_logprobs", "top_logprobs needs logprobs=true; add it, or leave top_logprobs out")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        refuse("max_tokens", "max_tokens=0 generates nothing; use at least 1")
    params = sampling_params(
        body,
        hello.default_params,
        settings,
        max_tokens=hello.default_params.get("max_tokens") if asked is None else asked,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    tools, choice = tools_of(front, body)
    declarations = [dict(tool.declaration) for tool in tools] or None
    prompt = await prompt_of(front, body, declarations, hello.max_model_len, name=name, places=places)
    text = prompt.text or ""
    prompt = truncated(prompt, body.truncate_prompt_tokens, hello.max_model_len)
    check_room(prompt, asked, hello.max_model_len, "messages")
    grammar, warnings = call_grammar(front, body, tools, choice, text) if tools else (None, [])
    if grammar is not None:
        if "structured_outputs" in params:
            refuse("tool_choice", "tool_choice and response_format constrain the same text; send one of them")
        params["structured_outputs"] = {"grammar": grammar}
    formats = front.formats
    make_parser: Callable[[], AnswerParser] | None = None
    if formats is not None and (tools or may_reason(formats)):
        params |= _marks_in_text(formats, body.stop)
        takes_reasoning = grammar is not None and isinstance(formats, Format) and formats.grammar_takes_reasoning
        waits = "structured_outputs" in params and not takes_reasoning
        end = reasoning_ahead(formats, text) if waits else None
        if end is not None:
            params["structured_outputs"] = {"after": end, **params["structured_outputs"]}
        make_parser = partial(
            formats.parser,
            text,
            tools,
            known_only=choice.names is not None,
            is_held=grammar is not None,
            awaits_answer=end is not None,
        )
    if isinstance(formats, Format) and formats.end_token_ids and not body.ignore_eos:
        params["stop_token_ids"] = [*(params.get("stop_token_ids") or ()), *formats.end_token_ids]
    ask = Ask(
        front.new_id("chatcmpl"),
        request.scope["state"]["request_id"],
        [prompt],
        params,
        request_options(body, settings, key_name(request.scope)),
        bool(body.stream),
        make_parser,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    return Prepared(ask, lambda generation: ChatAnswer(generation, body, model), warnings)


def _marks_in_text(formats: AnyFormat, stop: str | list[str] | None) -> dict[str, Any]:
    """Parameters that detokenize the special tokens in the marks of the parser or the request's stop strings."""
    kept = formats.kept_special_token_ids([stop] if isinstance(stop, str) else stop or [])
    return {"skip_special_tokens": False} if kept is None else {"kept_special_token_ids": kept}


class ChatAnswer(Answer):
    """The response, whole or as events.

    Args:
        generation, body, model: see ``Answer``.
    """

    kind, chunk_kind = ChatCompletion, ChatCompletionChunk

    def __init__(self, generation: Generation, body: ChatBody, model: str) -> None:
        super().__init__(generation, body, model)
        self._count = (body.top_logprobs or 0) if body.logprobs else None
        self._shows_reasoning = body.include_reasoning is not False
        self._begun: set[int] = set()
        self._num_calls = [0] * generation.ask.num_choices
        self.is_plain = self.is_plain and self._count is None

    def events(self, pieces: list[Piece]) -> bytes:
        """Events of new pieces."""
        return b"".join([self._events(piece) for piece in pieces])

    def body(self) -> ChatCompletion:
        """The response as one object."""
        answer: ChatCompletion = self.whole([])
        for i, choice in enumerate(self.choices.by_index):
            message = ChatMessage(content=choice.text)
            if choice.reasoning and self._shows_reasoning:
                message.reasoning_content = message.reasoning = choice.reasoning
            if choice.tool_calls:
                message.content = choice.text or None
                message.tool_calls = [CalledTool(**_call(call)) for call in choice.tool_calls]
            logprobs = self._logprobs(choice.logprobs)
            assert choice.finish_reason is not None
            entry = ChatChoice(i, message, logprobs, choice.finish_reason, choice.stop_reason)
            if self.asked.return_token_ids:
                entry.token_ids = choice.token_ids
            answer.choices.append(entry)
        if self.asked.prompt_logprobs is not None:
            scored = self.generation.prompt_logprobs[0]
            answer.prompt_logprobs = None if scored is None else prompt_logprobs(scored)
        if self.asked.return_token_ids:
            answer.prompt_token_ids = self.generation.ask.prompts[0].token_ids
        return answer

    def _events(self, piece: Piece) -> bytes:
        index = piece.choice
        role = b""
        if index not in self._begun:
            self._begun.add(index)
            first = ChatChunkChoice(index, ChatDelta(role="assistant", content=""))
            if self.asked.return_token_ids:
                first.prompt_token_ids = self.generation.ask.prompts[0].token_ids
            role = self.chunk([first])
        if self.is_plain and piece.finish_reason is None and not piece.reasoning and not piece.tool_calls:
            if not piece.text:
                return role
            return role + self.text_chunk(
                index, piece.text, lambda text: ChatChunkChoice(index, ChatDelta(content=text))
            )
        delta = ChatDelta(content=piece.text or UNSET)
        if piece.reasoning and self._shows_reasoning:
            delta.reasoning_content = delta.reasoning = piece.reasoning
        if piece.tool_calls:
            begin = self._num_calls[index]
            self._num_calls[index] += len(piece.tool_calls)
            delta.tool_calls = [
                CalledToolChunk(index=begin + i, **_call(call)) for i, call in enumerate(piece.tool_calls)
            ]
        logprobs = self._logprobs(piece.logprobs)
        choice = ChatChunkChoice(index, delta, logprobs, piece.finish_reason, piece.stop_reason)
        if self.asked.return_token_ids:
            choice.token_ids = piece.token_ids
        return role + self.chunk([choice])

    def _logprobs(self, entries: list[list[TokenLogprob]] | None) -> ChatLogprobs | None:
        if self._count is None:
            return None
        return ChatLogprobs(chat_logprobs(entries or [], self._count, self.texts))


def _call(call: ToolCall) -> dict[str, Any]:
    """Fields of a ``CalledTool``."""
    return {"id": call.id, "function": CalledFunction(call.name, call.arguments)}

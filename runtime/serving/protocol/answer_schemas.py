"""Answers of the routes as types, for the OpenAPI document: OpenAI's completions and chat, and all small ones.

Answers are made as dictionaries; what these types say of them is held by tests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

Count = Annotated[int, Field(ge=0)]
Ids = list[Count]


class ErrorObject(TypedDict):
    """What went wrong; ``param`` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    """OpenAI's error object."""

    error: ErrorObject


class Empty(TypedDict):
    """Nothing but the status."""


class CachedTokens(TypedDict):
    """Of a prompt's tokens, those that were computed before."""

    cached_tokens: Count


class UsageSoFar(TypedDict):
    """Tokens of all prompts and choices, while there may come more."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class Usage(UsageSoFar):
    """Tokens of all prompts and choices."""

    prompt_tokens_details: CachedTokens


StopReason = str | int | None
"""The stop string or token, ``"timeout"`` or ``"shutdown"``."""


class PromptLogprob(TypedDict):
    """A token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, by token ids; null for the first."""


class Generated(TypedDict):
    """What every answer with generated tokens begins with."""

    id: str
    created: Count
    model: str
    system_fingerprint: str


class CompletionLogprobs(TypedDict):
    """Lists with an entry for each token; the first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Ids


class CompletionChoice(TypedDict):
    """A text."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: StopReason
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    token_ids: NotRequired[Ids]
    prompt_token_ids: NotRequired[Ids]


class Completion(Generated):
    """Answer of ``POST /v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(TypedDict):
    """A piece of a text."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason
    token_ids: NotRequired[Ids]
    prompt_token_ids: NotRequired[Ids]


class CompletionChunk(Generated):
    """Event of ``POST /v1/completions``; one with the usage of all has no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | UsageSoFar | None]


CompletionEvents = TypeAliasType("CompletionEvents", CompletionChunk | Error)


class CalledFunction(TypedDict):
    """A function and its arguments, as the text of a JSON object."""

    name: str
    arguments: str


class CalledTool(TypedDict):
    """A call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledToolChunk(CalledTool):
    """A call at its place among those of the choice."""

    index: Count


class ChatToken(TypedDict):
    """A token by itself."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatTokenLogprob(ChatToken):
    """A token that was chosen, and the likeliest ones."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    """An entry for each token."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatMessage(TypedDict):
    """The assistant's message; its reasoning stands under two names."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


class ChatChoice(TypedDict):
    """A message."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: StopReason
    token_ids: NotRequired[Ids]


class ChatCompletion(Generated):
    """Answer of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[Ids]


class ChatDelta(TypedDict):
    """What is new of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[CalledToolChunk]]


class ChatChunkChoice(TypedDict):
    """A piece of a message."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: NotRequired[StopReason]
    token_ids: NotRequired[Ids]
    prompt_token_ids: NotRequired[Ids]


class ChatCompletionChunk(Generated):
    """Event of ``POST /v1/chat/completions``; one with the usage of all has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | UsageSoFar | None]


ChatEvents = TypeAliasType("ChatEvents", ChatCompletionChunk | Error)


class Capabilities(TypedDict):
    """What a model can be asked for beyond completions."""

    chat: bool
    tools: bool


class Model(TypedDict):
    """The model under one of its names."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    max_model_len: Count
    capabilities: Capabilities


class Models(TypedDict):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """Answer of ``POST /tokenize``; texts of the tokens only where they are asked for."""

    count: Count
    max_model_len: Count
    tokens: Ids
    token_strs: list[str] | None


class TokensText(TypedDict):
    """Answer of ``POST /detokenize``."""

    prompt: str


class Version(TypedDict):
    """Answer of ``GET /version``."""

    version: str


class Load(TypedDict):
    """Answer of ``GET /load``: requests, completions that run and wait, and the share of blocks in use."""

    server_load: Count
    running: Count
    waiting: Count
    kv_cache_usage: Annotated[float, Field(ge=0, le=1)]


class ServerInfo(TypedDict):
    """Answer of ``GET /server_info``; ``tasks`` are asyncio's of the API process."""

    settings: dict[str, Any]
    engine: dict[str, Any]
    stats: dict[str, Any]
    tasks: Count

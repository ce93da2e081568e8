"""Fields shared by completion and chat requests, with their types and bounds."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..http.errors import ApiError, refuse

MAX_STOP = 16
MAX_STOP_LENGTH = 256
MAX_BIASES = 1024
MAX_IGNORED_SHOWN = 16
"""Maximum names of ignored fields in the header; names of more than 64 characters are left out."""


def _whole(value: object) -> object:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53  # beyond, floats skip integers
    return int(value) if is_whole else value  # type: ignore[call-overload]


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer; as in JSON, 2.0 is 2."""
_TokenId = Annotated[Whole, Field(ge=0, lt=2**31)]
# Of long lists the first mistake is enough: an error for each would take gigabytes.
TokenIds = Annotated[list[_TokenId], Field(max_length=2**18, fail_fast=True)]
ShortTexts = Annotated[list[str], Field(max_length=1024, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=10_000, fail_fast=True)]


class Body(BaseModel):
    """A body that keeps unknown fields by name, to report them to the client."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    accepted: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted and ignored."""
    refused: ClassVar[dict[str, str]] = {}
    """Unsupported fields whose absence would matter: name → remedy."""

    def ignored_fields(self, strict: bool) -> list[str]:
        """Names of the ignored fields.

        Raises:
            ApiError: 400; a field is unsupported, or unknown and the server is strict.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if value not in (None, [], {}, "")}
        for name in extra:
            if name in self.refused:
                refuse(name, f"{name} is not supported; {self.refused[name]}", "unsupported_parameter")
        ignored = sorted(name for name in extra if name not in self.accepted)
        if ignored and strict:
            refuse(ignored[0][:200], f"{ignored[0][:200]!r} is not a known field; omit it", "unsupported_parameter")
        return ignored


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(Body):
    """Fields of every request to a model."""

    model: str | None = Field(None, max_length=256)
    request_id: str | None = None


class GenerationBody(RequestBody):
    """Fields of every request that generates text; null means absent."""

    max_tokens: Whole | None = Field(None, ge=0, description="Maximum new tokens.")
    min_tokens: Whole | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, description="0 means greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="0 means greedy.")
    top_k: Whole | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3, description="Other values would overflow logits.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: Whole | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: str | ShortTexts | None = None
    stop_token_ids: TokenIds | None = Field(None, max_length=MAX_BIASES)
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    bad_words: ShortTexts | None = None
    allowed_token_ids: TokenIds | None = None
    n: Whole | None = Field(None, ge=1)
    prompt_logprobs: Whole | None = Field(None, ge=0)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Whole | None = Field(None, ge=-1)
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    json_schema: dict[str, Any] | str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    priority: Whole | None = None
    cache_salt: str | None = Field(None, max_length=1024)
    user: str | None = Field(None, max_length=1024)
    timeout: float | None = Field(None, gt=0)

    accepted: ClassVar[frozenset[str]] = frozenset(
        {"service_tier", "store", "metadata", "safety_identifier", "prompt_cache_key", "client", "verbosity"}
    )
    refused: ClassVar[dict[str, str]] = {
        "prompt_embeds": "send text or token ids",
        "kv_transfer_params": "omit it",
        "use_beam_search": "use n or best_of",
        "length_penalty": "it needs beam search; omit it",
        "beam_width": "use n or best_of",
        "lora_request": "omit it",
        "thinking_token_budget": "use max_tokens",
    }

    def check_common(self) -> None:
        """Check bounds that need several fields, or more than a number.

        Raises:
            ApiError: 400.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP:
            refuse("stop", f"stop has {len(stop)} texts; the limit is {MAX_STOP}; send fewer")
        for i, text in enumerate(stop):
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                name = "stop" if isinstance(self.stop, str) else f"stop[{i}]"
                refuse("stop", f"{name} has {len(text)} characters; send 1 to {MAX_STOP_LENGTH}, or omit it")
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "stream_options needs stream=true; add it, or omit stream_options")
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "prompt_logprobs is not supported with stream=true; omit one of them")

    def biases(self) -> dict[int, float] | None:
        """``logit_bias`` by token id.

        Raises:
            ApiError: 400; a key is not a token id.
        """
        if self.logit_bias is None:
            return None
        biases = {}
        for key, value in self.logit_bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ApiError(
                    400,
                    "invalid_value",
                    f"logit_bias has the key {key[:40]!r}; use token ids as keys",
                    param="logit_bias",
                )
            biases[int(key)] = value
        return biases


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: Any = Field(
        ...,
        description="Text, several texts, token ids, or several lists of token ids.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                },
            ]
        },
    )
    echo: bool | None = None
    logprobs: Whole | None = Field(None, ge=0)
    best_of: Whole | None = Field(None, ge=1)

    refused: ClassVar[dict[str, str]] = {**GenerationBody.refused, "suffix": "write it into the prompt"}


_TOOL_SCHEMA: Any = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
        },
    },
}


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: Whole | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0)
    tools: list[Any] | None = Field(None, max_length=128, json_schema_extra={"items": _TOOL_SCHEMA})
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, max_length=64)
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = Field(None, max_length=1024)
    modalities: ShortTexts | None = None

    accepted: ClassVar[frozenset[str]] = GenerationBody.accepted | {"prediction"}
    refused: ClassVar[dict[str, str]] = {
        **GenerationBody.refused,
        "audio": "request text only",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "tokenize": "use /tokenize",
        "tokenizer": "start the server with it",
        "web_search_options": "use tools",
    }

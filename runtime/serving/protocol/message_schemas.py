"""Answers, events and errors of ``/v1/messages`` as types, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

Count = Annotated[int, Field(ge=0)]


class AnthropicErrorObject(TypedDict):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """Anthropic's error object, also as an event."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


class InputTokens(TypedDict):
    """Answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: Count


class TextBlock(TypedDict):
    """What the model said."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """What it thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A call; its input is empty where it begins."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class BegunUsage(TypedDict):
    """Tokens of a message that begins."""

    input_tokens: Count
    output_tokens: Count


class MessageUsage(BegunUsage):
    """Tokens of a message; cached ones are no part of the input's."""

    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count


MessageStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageEnd(TypedDict):
    """How a message ended."""

    stop_reason: MessageStopReason
    stop_sequence: str | None


class _Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]


class AnthropicMessage(_Message, MessageEnd):
    """Answer of ``POST /v1/messages``."""

    usage: MessageUsage


class BegunMessage(_Message):
    """A message without content or end yet."""

    stop_reason: None
    stop_sequence: None
    usage: BegunUsage


class MessageStartEvent(TypedDict):
    """A message begins."""

    type: Literal["message_start"]
    message: BegunMessage


class PingEvent(TypedDict):
    """Means nothing."""

    type: Literal["ping"]


class BlockStartEvent(TypedDict):
    """A block of the content begins."""

    type: Literal["content_block_start"]
    index: Count
    content_block: ContentBlock


class TextDelta(TypedDict):
    """A piece of text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """A piece of thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(TypedDict):
    """A piece of a call's input, as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDeltaEvent(TypedDict):
    """A block of the content grows."""

    type: Literal["content_block_delta"]
    index: Count
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, Field(discriminator="type")]


class BlockStopEvent(TypedDict):
    """A block of the content has ended."""

    type: Literal["content_block_stop"]
    index: Count


class MessageDeltaEvent(TypedDict):
    """How the message ended."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(TypedDict):
    """The message is over."""

    type: Literal["message_stop"]


MessageEvents = TypeAliasType(
    "MessageEvents",
    Annotated[
        MessageStartEvent
        | PingEvent
        | BlockStartEvent
        | BlockDeltaEvent
        | BlockStopEvent
        | MessageDeltaEvent
        | MessageStopEvent
        | AnthropicError,
        Field(discriminator="type"),
    ],
)

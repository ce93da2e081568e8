"""Responses of ``/v1/messages`` in Anthropic's form: one message, or the events that build it; and errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from typing_extensions import TypeAliasType

from ..generation.generate import Generation, Piece
from ..generation.usage import Count
from ..http.errors import ApiError
from .blocks import Block, Blocks, Change, Closed, Grew, Kind, Opened

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorObject(Struct):
    """Error details."""

    type: str
    message: str


class AnthropicError(Struct, tag="error"):
    """Anthropic's error object, also as an event."""

    error: AnthropicErrorObject
    request_id: str


class TextBlock(Struct, tag="text"):
    """Text of the model."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """Reasoning of the model."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    """A tool call; its input is empty at its beginning."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class BegunUsage(Struct):
    """Tokens at the beginning of a message."""

    input_tokens: Count
    output_tokens: Count = 0


class MessageUsage(Struct, kw_only=True):
    """Tokens of a message; the input's exclude cached ones."""

    input_tokens: Count
    cache_creation_input_tokens: Count = 0
    cache_read_input_tokens: Count
    output_tokens: Count


MessageStopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageEnd(Struct):
    """The end of a message: why it stopped."""

    stop_reason: MessageStopReason
    stop_sequence: str | None


class _Message(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]


class AnthropicMessage(_Message, kw_only=True):
    """Response of ``POST /v1/messages``."""

    stop_reason: MessageStopReason
    stop_sequence: str | None
    usage: MessageUsage


class BegunMessage(_Message, kw_only=True):
    """A message without content or end yet."""

    stop_reason: None = None
    stop_sequence: None = None
    usage: BegunUsage


class MessageStartEvent(Struct, tag="message_start"):
    """The beginning of a message."""

    message: BegunMessage


class PingEvent(Struct, tag="ping"):
    """A keep-alive event."""


class BlockStartEvent(Struct, tag="content_block_start"):
    """The beginning of a content block."""

    index: Count
    content_block: ContentBlock


class TextDelta(Struct, tag="text_delta"):
    """A piece of text."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    """A piece of thinking."""

    thinking: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    """A piece of a call's input, as JSON."""

    partial_json: str


Delta: TypeAlias = TextDelta | ThinkingDelta | InputJsonDelta


class BlockDeltaEvent(Struct, tag="content_block_delta"):
    """An addition to a content block."""

    index: Count
    delta: Delta


class BlockStopEvent(Struct, tag="content_block_stop"):
    """The end of a content block."""

    index: Count


class MessageDeltaEvent(Struct, tag="message_delta"):
    """The stop reason and usage of the message."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(Struct, tag="message_stop"):
    """The last event."""


MessageEvents = TypeAliasType(
    "MessageEvents",
    MessageStartEvent
    | PingEvent
    | BlockStartEvent
    | BlockDeltaEvent
    | BlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
    | AnthropicError,
)

_DELTAS: dict[Kind, type[Delta]] = {"text": TextDelta, "reasoning": ThinkingDelta, "tool_call": InputJsonDelta}


def anthropic_error(error: ApiError, request_id: str) -> AnthropicError:
    """Anthropic's error object."""
    kind = _ERROR_TYPES.get(error.status_code, "api_error" if error.status_code >= 500 else "invalid_request_error")
    return AnthropicError(AnthropicErrorObject(kind, error.message), request_id)


class MessageAnswer:
    """The response, whole or as events.

    Args:
        generation: the generation to render.
        model: the name to answer under.
        is_clamped: the context leaves less than the requested tokens.
    """

    done = b""

    def __init__(self, generation: Generation, model: str, is_clamped: bool) -> None:
        self._generation = generation
        self._model = model
        self._is_clamped = is_clamped
        self._blocks = Blocks()
        self._is_begun = False

    def events(self, pieces: list[Piece]) -> bytes:
        """Events of new pieces."""
        return self._begin() + self._events(self._blocks.feed(pieces))

    def last_events(self) -> bytes:
        """Events for the end of the last block and of the message."""
        ends = self._begin() + self._events(self._blocks.close())
        return ends + _event(MessageDeltaEvent(self._end(), self._usage())) + _event(MessageStopEvent())

    def failure_events(self, error: ApiError) -> bytes:
        """The error as an event."""
        return _event(anthropic_error(error, self._generation.ask.request_id))

    def failure_body(self, error: ApiError, request_id: str) -> AnthropicError:
        """Anthropic's error object."""
        return anthropic_error(error, request_id)

    def add(self, pieces: list[Piece]) -> None:
        """Keep pieces for the whole response."""
        self._blocks.add(pieces)

    def body(self) -> AnthropicMessage:
        """The response as one object."""
        end = self._end()
        return AnthropicMessage(
            id=self._generation.ask.id,
            model=self._model,
            content=[_content(block, block.text) for block in self._blocks.all],
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=self._usage(),
        )

    def _begin(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        usage = BegunUsage(self._generation.usage_so_far().prompt_tokens)
        message = BegunMessage(id=self._generation.ask.id, model=self._model, content=[], usage=usage)
        return _event(MessageStartEvent(message)) + _event(PingEvent())

    def _events(self, changes: Iterable[Change]) -> bytes:
        found = []
        for change in changes:
            index = change.block.index
            if isinstance(change, Opened):
                found.append(_event(BlockStartEvent(index, _content(change.block, ""))))
            elif isinstance(change, Grew):
                found.append(_event(BlockDeltaEvent(index, _DELTAS[change.block.kind](change.text))))
            elif isinstance(change, Closed):
                found.append(_event(BlockStopEvent(index)))
        return b"".join(found)

    def _end(self) -> MessageEnd:
        reason: MessageStopReason = "end_turn"
        sequence = None
        stop = self._blocks.stop_reason
        if self._blocks.finish_reason == "tool_calls":
            reason = "tool_use"
        elif self._blocks.finish_reason == "length":
            is_full = self._is_clamped and stop is None
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(stop, str):
            reason, sequence = "stop_sequence", stop
        return MessageEnd(reason, sequence)

    def _usage(self) -> MessageUsage:
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


def _event(event: Struct) -> bytes:
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"


def _content(block: Block, text: str) -> ContentBlock:
    """A block with this part of its text."""
    if block.call is not None:
        return ToolUseBlock(block.call.id, block.call.name, msgspec.json.decode(text or "{}"))
    return ThinkingBlock(text) if block.kind == "reasoning" else TextBlock(text)

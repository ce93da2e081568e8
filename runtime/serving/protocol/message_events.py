"""Answers of ``/v1/messages`` in Anthropic's form: one message, or events that build it up; and its errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ..generation.generate import Generation, Piece
from ..http.errors import ApiError
from .blocks import Block, Blocks, Change, Closed, Grew, Opened

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


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _ERROR_TYPES.get(error.status_code, "api_error" if error.status_code >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


class MessageAnswer:
    """The answer, whole or in events.

    Args:
        generation: whose pieces are shown.
        model: the name to answer under.
        is_clamped: the context has less room than was asked for.
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
        """The end of the last block and of the message."""
        ends = self._begin() + self._events(self._blocks.close())
        usage = self._usage()
        return b"".join(
            (ends, _event("message_delta", delta=self._end(), usage=usage), _event("message_stop")),
        )

    def failure_events(self, error: ApiError) -> bytes:
        """The error as an event."""
        return _event(**anthropic_error(error, self._generation.ask.request_id))

    def failure_body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """Anthropic's error object."""
        return anthropic_error(error, request_id)

    def add(self, pieces: list[Piece]) -> None:
        """Keep pieces for the whole answer."""
        self._blocks.add(pieces)

    def body(self) -> dict[str, Any]:
        """The answer as one object."""
        content = [_whole(block) for block in self._blocks.all]
        return self._message(content=content, **self._end(), usage=self._usage())

    def _begin(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        usage = {"input_tokens": self._generation.usage_so_far().prompt_tokens, "output_tokens": 0}
        message = self._message(content=[], stop_reason=None, stop_sequence=None, usage=usage)
        return _event("message_start", message=message) + _event("ping")

    def _events(self, changes: Iterable[Change]) -> bytes:
        found = []
        for change in changes:
            index = change.block.index
            if isinstance(change, Opened):
                found.append(_event("content_block_start", index=index, content_block=_empty(change.block)))
            elif isinstance(change, Grew):
                delta = _delta(change.block, change.text)
                found.append(_event("content_block_delta", index=index, delta=delta))
            elif isinstance(change, Closed):
                found.append(_event("content_block_stop", index=index))
        return b"".join(found)

    def _end(self) -> dict[str, Any]:
        """How it ended."""
        reason, sequence = "end_turn", None
        stop = self._blocks.stop_reason
        if self._blocks.finish_reason == "tool_calls":
            reason = "tool_use"
        elif self._blocks.finish_reason == "length":
            is_full = self._is_clamped and stop is None
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(stop, str):
            reason, sequence = "stop_sequence", stop
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Here cached tokens are no part of the input's."""
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }

    def _message(self, **fields: Any) -> dict[str, Any]:
        return {
            "id": self._generation.ask.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            **fields,
        }


def _event(type: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": type, **fields})
    return b"event: " + type.encode() + b"\ndata: " + data + b"\n\n"


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "tool_call":
        assert block.call is not None
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "tool_call":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _whole(block: Block) -> dict[str, Any]:
    found = _empty(block)
    if block.kind == "tool_call":
        return found | {"input": msgspec.json.decode(block.text or "{}")}
    return found | {"thinking" if block.kind == "reasoning" else "text": block.text}

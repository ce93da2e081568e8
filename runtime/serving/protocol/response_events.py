"""Answers of ``/v1/responses``: one object, or events that build it up."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from ..generation.generate import Generation, Piece
from ..http.errors import ApiError, Error
from .blocks import Block, Blocks, Change, Closed, Grew, Opened
from .reasoning_tokens import count_reasoning_tokens

_ENDED_BY_SERVER = ("timeout", "shutdown")


class ResponseAnswer:
    """The answer, whole or in events.

    Args:
        generation: whose pieces are shown.
        asked: fields of the object ``response`` that repeat the request.
    """

    done = b""

    def __init__(self, generation: Generation, asked: dict[str, Any]) -> None:
        self._generation = generation
        self._asked = asked
        self._mark = generation.ask.id.partition("_")[2]
        self._created = int(time.time())
        self._blocks = Blocks()
        self._sequence = 0

    def events(self, pieces: list[Piece]) -> bytes:
        """Events of new pieces."""
        return self._begin() + self._events(self._blocks.feed(pieces))

    def last_events(self) -> bytes:
        """The rest, and the whole answer once more."""
        ends = self._begin() + self._events(self._last_changes(), self._status)
        answer = self.body()
        return ends + self._event(f"response.{answer['status']}", response=answer)

    def failure_events(self, error: ApiError) -> bytes:
        """The event of a failed response."""
        begin = self._begin()
        code = "server_error" if error.status_code >= 500 else error.code
        failed = self._response("failed", error={"code": code, "message": error.message})
        return begin + self._event("response.failed", response=failed)

    def failure_body(self, error: ApiError, request_id: str) -> Error:
        """OpenAI's error object."""
        return error.body()

    def add(self, pieces: list[Piece]) -> None:
        """Keep pieces for the whole answer."""
        self._blocks.add(pieces)

    def body(self) -> dict[str, Any]:
        """The answer as one object."""
        for _ in self._last_changes():
            pass
        status, details = self._status, None
        if status == "incomplete":
            ended_by = (
                self._blocks.stop_reason if self._blocks.stop_reason in _ENDED_BY_SERVER else "max_output_tokens"
            )
            details = {"reason": ended_by}
        *earlier, last = self._blocks.all
        output = [*(self._item(block, "completed") for block in earlier), self._item(last, status)]
        return self._response(status, output=output, incomplete_details=details, usage=self._usage())

    @property
    def _status(self) -> str:
        return "incomplete" if self._blocks.finish_reason == "length" else "completed"

    def _last_changes(self) -> Iterable[Change]:
        """Clients read the first message's text, so there is one even where nothing was said."""
        if not self._blocks.all:
            yield from self._blocks.open_text()
        yield from self._blocks.close()

    def _begin(self) -> bytes:
        if self._sequence:
            return b""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _events(self, changes: Iterable[Change], status: str = "completed") -> bytes:
        """Events of changes, made one by one as they happen; blocks that end have this status."""
        found = []
        for change in changes:
            block = change.block
            place = {"output_index": block.index}
            if isinstance(change, Opened):
                found.append(
                    self._event("response.output_item.added", **place, item=self._item(block, "in_progress"))
                )
                if block.kind != "tool_call":
                    found.append(
                        self._event("response.content_part.added", **self._part_of(block), part=_part(block))
                    )
            elif isinstance(change, Grew):
                found.append(self._grew(block, change.text))
            elif isinstance(change, Closed):
                found.append(self._closed(block))
                found.append(self._event("response.output_item.done", **place, item=self._item(block, status)))
        return b"".join(found)

    def _grew(self, block: Block, text: str) -> bytes:
        if block.kind == "text":
            return self._event("response.output_text.delta", **self._part_of(block), delta=text, logprobs=[])
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._part_of(block), delta=text)
        return self._event(
            "response.function_call_arguments.delta",
            item_id=self._item_id(block),
            output_index=block.index,
            delta=text,
        )

    def _closed(self, block: Block) -> bytes:
        if block.kind == "tool_call":
            assert block.call is not None
            return self._event(
                "response.function_call_arguments.done",
                item_id=self._item_id(block),
                output_index=block.index,
                name=block.call.name,
                arguments=block.text,
            )
        place = self._part_of(block)
        if block.kind == "text":
            ended = self._event("response.output_text.done", **place, text=block.text, logprobs=[])
        else:
            ended = self._event("response.reasoning_text.done", **place, text=block.text)
        return ended + self._event("response.content_part.done", **place, part=_part(block))

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _part_of(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}[block.kind]
        return f"{prefix}_{self._mark}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an item of the output; while it is in progress, without its text."""
        begun = status == "in_progress"
        if block.kind == "tool_call":
            assert block.call is not None
            return {
                "type": "function_call",
                "id": self._item_id(block),
                "call_id": block.call.id,
                "name": block.call.name,
                "arguments": block.text,
                "status": status if begun else "completed",
            }
        content = [] if begun else [_part(block)]
        if block.kind == "reasoning":
            item = {"type": "reasoning", "id": self._item_id(block), "summary": [], "content": content}
            return item | {"encrypted_content": None, "status": status}
        return {
            "type": "message",
            "id": self._item_id(block),
            "role": "assistant",
            "content": content,
            "status": status,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        reasoning = "".join(block.text for block in self._blocks.all if block.kind == "reasoning")
        counted = count_reasoning_tokens(self._generation.front.tokenizer, reasoning)
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(counted, usage.completion_tokens)},
            "total_tokens": usage.total_tokens,
        }

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": self._generation.ask.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self._asked,
            "output": [],
            "usage": None,
            **fields,
        }


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

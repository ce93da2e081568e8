"""Responses of ``/v1/responses``: one object, or the events that build it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from typing_extensions import TypeAliasType

from ..generation.generate import Generation, Piece, StopReason
from ..generation.usage import Count
from ..http.errors import ApiError, Error
from .blocks import Block, Blocks, Change, Closed, Grew, Opened
from .reasoning_tokens import count_reasoning_tokens

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag="reasoning_text"):
    """Text of reasoning."""

    text: str


Part: TypeAlias = OutputText | ReasoningText


class MessageItem(Struct, tag="message", kw_only=True):
    """A message of the model; empty while in progress."""

    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]
    status: ItemStatus


class ReasoningItem(Struct, tag="reasoning", kw_only=True):
    """Reasoning of the model."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: None = None
    status: ItemStatus


class FunctionCallItem(Struct, tag="function_call", kw_only=True):
    """A call; its arguments are the text of a JSON object."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(Struct):
    """Details of the input tokens."""

    cached_tokens: Count
    cache_write_tokens: Count = 0


class OutputDetails(Struct):
    """Details of the output tokens."""

    reasoning_tokens: Count


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseError(Struct):
    """Why a response failed."""

    code: str
    message: str


IncompleteReason: TypeAlias = Literal["max_output_tokens", "timeout", "shutdown"]


class IncompleteDetails(Struct):
    """Why a response ended early."""

    reason: IncompleteReason


class ReasoningSettings(Struct):
    """The reasoning effort."""

    effort: str | None
    summary: None = None


class TextSettings(Struct):
    """The requested form of the text."""

    format: dict[str, Any]


AlwaysFalse: TypeAlias = Annotated[bool, Meta(extra_json_schema={"const": False})]


class ResponseObject(Struct, kw_only=True):
    """A response, in any state; most fields repeat the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None = None
    background: AlwaysFalse = False
    store: AlwaysFalse = False
    reasoning: ReasoningSettings
    service_tier: str = "default"
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count = 0
    top_p: float
    truncation: str = "disabled"
    user: str | None
    output: list[Item] = []
    usage: ResponseUsage | None = None


class _Event(Struct):
    type: str
    sequence_number: Count


class ResponseEvent(_Event):
    """The current response: at the beginning, and at the end."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class ItemEvent(_Event):
    """The beginning or end of an item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: Count
    item: Item


class _PartEvent(_Event):
    item_id: str
    output_index: Count
    content_index: Count


class PartEvent(_PartEvent):
    """The beginning or end of a part of an item."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Part


class TextDeltaEvent(_PartEvent):
    """A piece of text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[Any] = []


class TextDoneEvent(_PartEvent):
    """The complete text of a part."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[Any] = []


class ReasoningDeltaEvent(_PartEvent):
    """A piece of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(_PartEvent):
    """The complete reasoning of a part."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(_Event):
    """A piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: Count
    delta: str


class ArgumentsDoneEvent(_Event):
    """The complete arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: Count
    name: str
    arguments: str


ResponseEvents = TypeAliasType(
    "ResponseEvents",
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent,
)

_ENDED_BY_SERVER: dict[StopReason, IncompleteReason] = {"timeout": "timeout", "shutdown": "shutdown"}


class ResponseAnswer:
    """The response, whole or as events.

    Args:
        generation: the generation to render.
        begun: the response at its beginning.
    """

    done = b""

    def __init__(self, generation: Generation, begun: ResponseObject) -> None:
        self._generation = generation
        self._begun = begun
        self._mark = generation.ask.id.partition("_")[2]
        self._blocks = Blocks()
        self._sequence = 0

    def events(self, pieces: list[Piece]) -> bytes:
        """Events of new pieces."""
        return self._begin() + self._events(self._blocks.feed(pieces))

    def last_events(self) -> bytes:
        """The remaining events, and the whole response once more."""
        ends = self._begin() + self._events(self._last_changes(), self._status)
        answer = self.body()
        return ends + self._event(ResponseEvent, f"response.{answer.status}", answer)

    def failure_events(self, error: ApiError) -> bytes:
        """The event of a failed response."""
        begin = self._begin()
        code = "server_error" if error.status_code >= 500 else error.code
        failed = replace(self._begun, status="failed", error=ResponseError(code, error.message))
        return begin + self._event(ResponseEvent, "response.failed", failed)

    def failure_body(self, error: ApiError, request_id: str) -> Error:
        """OpenAI's error object."""
        return error.body()

    def add(self, pieces: list[Piece]) -> None:
        """Keep pieces for the whole response."""
        self._blocks.add(pieces)

    def body(self) -> ResponseObject:
        """The response as one object."""
        for _ in self._last_changes():
            pass
        status, details = self._status, None
        if status == "incomplete":
            details = IncompleteDetails(_ENDED_BY_SERVER.get(self._blocks.stop_reason, "max_output_tokens"))
        *earlier, last = self._blocks.all
        output = [*(self._item(block, "completed") for block in earlier), self._item(last, status)]
        return replace(self._begun, status=status, output=output, incomplete_details=details, usage=self._usage())

    @property
    def _status(self) -> ItemStatus:
        return "incomplete" if self._blocks.finish_reason == "length" else "completed"

    def _last_changes(self) -> Iterable[Change]:
        """Ensure a message: clients read the first one's text even if it is empty."""
        if not self._blocks.all:
            yield from self._blocks.open_text()
        yield from self._blocks.close()

    def _begin(self) -> bytes:
        if self._sequence:
            return b""
        created = self._event(ResponseEvent, "response.created", self._begun)
        return created + self._event(ResponseEvent, "response.in_progress", self._begun)

    def _events(self, changes: Iterable[Change], status: ItemStatus = "completed") -> bytes:
        """Events of the changes, made one by one; blocks that end get this status."""
        found = []
        for change in changes:
            block = change.block
            if isinstance(change, Opened):
                begun = self._item(block, "in_progress")
                found.append(self._event(ItemEvent, "response.output_item.added", block.index, begun))
                if block.kind != "tool_call":
                    place = self._place(block)
                    found.append(self._event(PartEvent, "response.content_part.added", *place, _part(block)))
            elif isinstance(change, Grew):
                found.append(self._grew(block, change.text))
            elif isinstance(change, Closed):
                found.append(self._closed(block))
                ended = self._item(block, status)
                found.append(self._event(ItemEvent, "response.output_item.done", block.index, ended))
        return b"".join(found)

    def _grew(self, block: Block, text: str) -> bytes:
        if block.kind == "text":
            return self._event(TextDeltaEvent, "response.output_text.delta", *self._place(block), text)
        if block.kind == "reasoning":
            return self._event(ReasoningDeltaEvent, "response.reasoning_text.delta", *self._place(block), text)
        name = "response.function_call_arguments.delta"
        return self._event(ArgumentsDeltaEvent, name, self._item_id(block), block.index, text)

    def _closed(self, block: Block) -> bytes:
        if block.call is not None:
            name = "response.function_call_arguments.done"
            fields = self._item_id(block), block.index, block.call.name, block.text
            return self._event(ArgumentsDoneEvent, name, *fields)
        place = self._place(block)
        if block.kind == "text":
            ended = self._event(TextDoneEvent, "response.output_text.done", *place, block.text)
        else:
            ended = self._event(ReasoningDoneEvent, "response.reasoning_text.done", *place, block.text)
        return ended + self._event(PartEvent, "response.content_part.done", *place, _part(block))

    def _event(self, kind: Callable[..., Struct], name: str, *fields: Any) -> bytes:
        data = msgspec.json.encode(kind(name, self._sequence, *fields))
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def _place(self, block: Block) -> tuple[str, int, int]:
        """Fields of a block's only part."""
        return self._item_id(block), block.index, 0

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}[block.kind]
        return f"{prefix}_{self._mark}_{block.index}"

    def _item(self, block: Block, status: ItemStatus) -> Item:
        """A block as an output item; without its text while in progress."""
        begun = status == "in_progress"
        item_id = self._item_id(block)
        if block.call is not None:
            return FunctionCallItem(
                id=item_id,
                call_id=block.call.id,
                name=block.call.name,
                arguments=block.text,
                status=status if begun else "completed",
            )
        content: list[Any] = [] if begun else [_part(block)]
        kind = ReasoningItem if block.kind == "reasoning" else MessageItem
        return kind(id=item_id, content=content, status=status)

    def _usage(self) -> ResponseUsage:
        usage = self._generation.usage()
        reasoning = "".join(block.text for block in self._blocks.all if block.kind == "reasoning")
        counted = count_reasoning_tokens(self._generation.front.tokenizer, reasoning)
        return ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(min(counted, usage.completion_tokens)),
            usage.total_tokens,
        )


def _part(block: Block) -> Part:
    return ReasoningText(block.text) if block.kind == "reasoning" else OutputText(block.text)

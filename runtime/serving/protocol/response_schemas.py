"""Answers and events of ``/v1/responses`` as types, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

Count = Annotated[int, Field(ge=0)]

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(TypedDict):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


Part = Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class MessageItem(TypedDict):
    """What the model said; empty while it is in progress."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus


class ReasoningItem(TypedDict):
    """What it thought."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None
    status: ItemStatus


class FunctionCallItem(TypedDict):
    """A call; its arguments are the text of a JSON object."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = Annotated[MessageItem | ReasoningItem | FunctionCallItem, Field(discriminator="type")]


class InputDetails(TypedDict):
    """Of the input's tokens."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(TypedDict):
    """Of the output's tokens."""

    reasoning_tokens: Count


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response ended early."""

    reason: Literal["max_output_tokens", "timeout", "shutdown"]


class ReasoningSettings(TypedDict):
    """How much the model was to think."""

    effort: str | None
    summary: None


class TextSettings(TypedDict):
    """The form of the text that was asked for."""

    format: dict[str, Any]


class ResponseObject(TypedDict):
    """A response, in any state; most fields repeat what was asked."""

    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    background: Literal[False]
    store: Literal[False]
    reasoning: ReasoningSettings
    service_tier: str
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: str
    user: str | None
    output: list[Item]
    usage: ResponseUsage | None


class _Event(TypedDict):
    sequence_number: Count


class ResponseEvent(_Event):
    """The response as it is now: at the beginning, and at the end."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class ItemEvent(_Event):
    """An item begins or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: Count
    item: Item


class _PartEvent(_Event):
    item_id: str
    output_index: Count
    content_index: Count


class PartEvent(_PartEvent):
    """A part of an item begins or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Part


class TextDeltaEvent(_PartEvent):
    """A piece of text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[Any]


class TextDoneEvent(_PartEvent):
    """The whole text of a part."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[Any]


class ReasoningDeltaEvent(_PartEvent):
    """A piece of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(_PartEvent):
    """The whole reasoning of a part."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(_Event):
    """A piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: Count
    delta: str


class ArgumentsDoneEvent(_Event):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: Count
    name: str
    arguments: str


ResponseEvents = TypeAliasType(
    "ResponseEvents",
    Annotated[
        ResponseEvent
        | ItemEvent
        | PartEvent
        | TextDeltaEvent
        | TextDoneEvent
        | ReasoningDeltaEvent
        | ReasoningDoneEvent
        | ArgumentsDeltaEvent
        | ArgumentsDoneEvent,
        Field(discriminator="type"),
    ],
)

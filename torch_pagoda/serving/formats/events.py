"""Parts of a completion as the parser finds them: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call.

    Attributes:
        id: matched by the tool message with its result.
        name: of the function.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


Event: TypeAlias = ContentDelta | ReasoningDelta | ToolCall


def merge_events(events: Iterable[Event]) -> list[Event]:
    """The same events, neighboring deltas of a kind joined."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            merged[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            merged[-1] = ReasoningDelta(last.text + event.text)
        else:
            merged.append(event)
    return merged

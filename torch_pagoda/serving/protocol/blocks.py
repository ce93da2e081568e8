"""Blocks of an output in text order: a run of content, a run of reasoning, or one tool call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..formats.events import ContentDelta, Event, ReasoningDelta, ToolCall
from ..generation.generate import Piece

Kind = Literal["text", "reasoning", "tool_call"]


@dataclass(slots=True)
class Block:
    """One block.

    Attributes:
        index: its index in the output.
        kind: its kind of content.
        call: the call, for kind ``"tool_call"``.
        parts: its text in pieces; for a call, the arguments.
    """

    index: int
    kind: Kind
    call: ToolCall | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The complete text so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A new block, still empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    """A block's text has grown by ``text``."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a block."""

    block: Block


Change: TypeAlias = Opened | Grew | Closed


class Blocks:
    """Groups the pieces of one output into blocks, the same for streams and whole responses."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._open: Block | None = None

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add new pieces."""
        for _ in self.feed(pieces):
            pass

    def feed(self, pieces: Iterable[Piece]) -> Iterator[Change]:
        """Add new pieces; yields the changes."""
        for piece in pieces:
            if piece.finish_reason is not None:
                self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
            yield from self._take(piece.events)

    def _take(self, events: Iterable[Event]) -> Iterator[Change]:
        for event in events:
            if isinstance(event, ToolCall):
                yield from self.close()
                yield from self._begin("tool_call", event)
                yield from self._grow(event.arguments)
                yield from self.close()
            elif isinstance(event, ReasoningDelta):
                yield from self._run("reasoning", event)
            else:
                yield from self._run("text", event)

    def open_text(self) -> Iterator[Change]:
        """Begin a block of text, which may stay empty."""
        yield from self._begin("text")

    def close(self) -> Iterator[Change]:
        """End the open block, if any."""
        if self._open is not None:
            yield Closed(self._open)
            self._open = None

    def _run(self, kind: Kind, event: ContentDelta | ReasoningDelta) -> Iterator[Change]:
        if not event.text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self.close()
            yield from self._begin(kind)
        yield from self._grow(event.text)

    def _begin(self, kind: Kind, call: ToolCall | None = None) -> Iterator[Change]:
        self._open = Block(len(self.all), kind, call)
        self.all.append(self._open)
        yield Opened(self._open)

    def _grow(self, text: str) -> Iterator[Change]:
        assert self._open is not None
        if text:
            self._open.parts.append(text)
            yield Grew(self._open, text)

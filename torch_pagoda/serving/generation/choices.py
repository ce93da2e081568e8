"""Choices of a response without streaming, assembled from their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine_process.wire import TokenLogprob
from ..formats.events import ToolCall
from .generate import ChoiceEnd, Piece, StopReason


@dataclass(slots=True)
class Choice:
    """One choice so far."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: ChoiceEnd | None = None
    stop_reason: StopReason = None

    @property
    def text(self) -> str:
        """Text of the content."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """Text of the reasoning."""
        return "".join(self.reasonings)


class Choices:
    """All choices of a response."""

    def __init__(self, count: int) -> None:
        self.by_index = [Choice() for _ in range(count)]

    def add(self, pieces: Sequence[Piece]) -> None:
        """Append pieces to their choices."""
        for piece in pieces:
            choice = self.by_index[piece.choice]
            choice.texts.append(piece.text)
            choice.reasonings.append(piece.reasoning)
            choice.tool_calls += piece.tool_calls
            choice.token_ids += piece.token_ids
            choice.logprobs += piece.logprobs or ()
            if piece.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason

"""The seam between answers and the formats in which models write reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .formats.events import Event


class TextParser(Protocol):
    """Reads one choice's text as it comes: content, reasoning and tool calls."""

    def feed(self, text: str, token_ids: Sequence[int]) -> Sequence[Event]:
        """Take new text and its tokens; returns what is certain by now."""
        ...

    def finish(self) -> Sequence[Event]:
        """Take the end of the text; returns what was held back."""
        ...


class TextFormats(Protocol):
    """Formats of one model."""

    @property
    def takes_tools(self) -> bool:
        """The model's template shows tools to it, and its calls can be read."""
        ...

    def parser(self, prompt: str, tools: Sequence[dict[str, Any]] | None) -> Callable[[], TextParser] | None:
        """What makes a parser for each choice; None where all text is content.

        Args:
            prompt: the rendered conversation, whose end may have begun a region of the answer.
            tools: that the model may call; None: none.
        """
        ...

    def tool_grammar(self, tools: Sequence[dict[str, Any]], tool_choice: Any) -> dict[str, Any] | None:
        """``structured_outputs`` that enforce a call, for ``"required"`` and named functions; None: nothing to."""
        ...

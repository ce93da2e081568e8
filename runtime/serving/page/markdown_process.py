"""Rendering in a process of its own, so that no text can hold up the streams of others or run for ever."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..child_process import ChildBusy, ChildFailed, ChildProcess


class RenderBusy(RuntimeError):
    """More texts wait than ``MarkdownRenderer.max_waiting``."""


class RenderFailed(ValueError):
    """A text was not rendered: it took too long, or the process ended."""


class MarkdownRenderer(ChildProcess):
    """A process that renders.

    Args:
        seconds: that one call may take, all its texts together.
        max_waiting: as for ``ChildProcess``.
    """

    def __init__(self, seconds: float = 5.0, max_waiting: int = 16) -> None:
        super().__init__(f"{__package__}.markdown", seconds, max_waiting)

    async def render(self, texts: Sequence[str]) -> bytes:
        """JSON of the blocks of each text, see ``markdown.Block``.

        Raises:
            RenderBusy: too many wait.
            RenderFailed: no answer in time, or none at all.
        """
        try:
            answer = await self.ask(json.dumps(list(texts)).encode())
        except ChildBusy as error:
            raise RenderBusy(str(error)) from None
        except ChildFailed:
            raise RenderFailed(f"the text was not rendered within {self.seconds} s; show it as it is") from None
        if not answer:
            raise RenderFailed("the text could not be rendered; show it as it is")
        return answer

"""Templates that requests bring, rendered in a process of its own: they may loop for ever, or write without end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...requests.conversation import ConversationError, Message
from ..child_process import ChildBusy, ChildFailed, ChildProcess
from ..http.errors import ApiError, refuse

TEMPLATE_SECONDS = 5.0
"""For a template to be compiled and rendered."""
TEMPLATE_BYTES = 2**28
"""Of memory that a template may take while it is rendered."""
_GRACE = 2.0
"""Seconds after which a process that does not end a template itself is killed: it is within one long operation."""
_START_SECONDS = 60.0


class TemplateProcess:
    """Renders conversations by templates that nobody here has seen.

    The process imports transformers' templates and no torch: 60 MB and a second.

    Args:
        seconds: for one.
        max_bytes: of memory for one.
    """

    def __init__(self, seconds: float = TEMPLATE_SECONDS, max_bytes: int = TEMPLATE_BYTES) -> None:
        self._seconds, self._max_bytes = seconds, max_bytes
        self._process = ChildProcess(
            f"{__package__}.template_worker", seconds + _GRACE, start_seconds=_START_SECONDS, max_waiting=8
        )

    def close(self) -> None:
        """End the process."""
        self._process.close()

    async def render(
        self, tokenizer: Any, messages: Sequence[Message], chat_template: str, most: int, **options: Any
    ) -> str:
        """The text of a conversation, as ``render_conversation`` gives it.

        Args:
            tokenizer: whose special tokens the template may name.
            messages: the conversation.
            chat_template: the request's.
            most: characters of the text.
            options: as for ``render_conversation``.

        Raises:
            ApiError: 400 about ``chat_template``: it takes too much time or memory, writes too much, or refuses the
                messages; 429: too many wait.
            ConversationError: as ``render_conversation``.
        """
        # By its name a request may choose one of several of the tokenizer's own.
        source = tokenizer.get_chat_template(chat_template, options.get("tools"))
        request = {
            "messages": messages,
            "options": {**options, "chat_template": source},
            "special_tokens": getattr(tokenizer, "special_tokens_map", {}),
            "seconds": self._seconds,
            "bytes": self._max_bytes,
            "most": most,
        }
        try:
            answer = await self._process.ask(json.dumps(request, default=str).encode())
        except ChildBusy:
            text = "too many templates of requests wait to be rendered; try again soon"
            raise ApiError(429, "queue_full", text, headers={"retry-after": "1"}) from None
        except ChildFailed:
            answer = b'{"error": "time"}'
        read = json.loads(answer)
        if "text" in read:
            return str(read["text"])
        if "field" in read:
            raise ConversationError(read["field"], read["error"])
        reasons = {
            "time": f"is not rendered within {self._seconds:g} s; make it simpler",
            "memory": f"takes more than {self._max_bytes >> 20} MiB to render; make it simpler",
            "length": f"writes more than {most} characters; make it write less",
        }
        refuse("chat_template", "chat_template " + reasons.get(read["error"], f"fails: {read['error']}"))

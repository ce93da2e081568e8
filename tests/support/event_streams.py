"""Server-sent events as clients read them."""

from __future__ import annotations

import json
from typing import Any

DONE = "[DONE]"


def events(text: str) -> list[Any]:
    """The JSON of every event; the last one must be ``[DONE]``, which is left out. Comments are passed over."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == f"data: {DONE}"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def completion_text(chunks: list[Any], index: int = 0) -> str:
    """Text of a choice of ``/v1/completions``."""
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def chat_text(chunks: list[Any], index: int = 0) -> str:
    """Content of a choice of ``/v1/chat/completions``."""
    return "".join(
        c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"] if c["index"] == index
    )

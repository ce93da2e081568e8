"""Formats of a made-up model that thinks in ``<think>…</think>`` and calls in ``<call>name {…}</call>``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch_pagoda.serving.formats.events import ContentDelta, Event, ReasoningDelta, ToolCall
from torch_pagoda.serving.formats.tools import Tool, ToolChoice

MARKS = ("<think>", "</think>", "<call>", "</call>")


class MarkedParser:
    """Reads marked text in pieces of any size; a call is told when it is whole."""

    def __init__(self) -> None:
        self._held = ""
        self._region = ""
        self._num_calls = 0

    malformed = 0
    reasoning_open = False

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while (found := re.search("|".join(MARKS), self._held)) is not None:
            events += self._take(self._held[: found.start()])
            self._held = self._held[found.end() :]
            self._region = "" if found[0].startswith("</") else found[0]
        if self._region != "<call>":
            kept = max((n for mark in MARKS for n in range(len(mark)) if self._held.endswith(mark[:n])), default=0)
            events += self._take(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
        return events

    def finish(self) -> list[Event]:
        rest, self._held, self._region = self._held, "", ""
        return self._take(rest)

    def _take(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._region == "<think>":
            return [ReasoningDelta(text)]
        if self._region == "<call>":
            self._num_calls += 1
            name, _, arguments = text.partition(" ")
            return [ToolCall(f"call_{self._num_calls}", name, arguments)]
        return [ContentDelta(text)]


class MarkedFormats:
    """Formats as the server asks for them; keeps the modes of ``tool_choice`` for which it was asked a grammar."""

    calls_tools = True

    def __init__(self) -> None:
        self.choices: list[str] = []

    def kept_special_token_ids(self, stop: Sequence[str] = ()) -> list[int]:
        return []

    def reasoning_ahead(self, prompt_text: str) -> None:
        return None

    def parser(self, prompt_text: str, tools: Sequence[Tool] = (), **_: Any) -> MarkedParser:
        return MarkedParser()

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, **_: Any) -> str:
        self.choices.append(choice.mode)
        return "start: /.*/"

"""Output formats: how model families write tool calls and reasoning, and the parsers and grammars for them."""

from __future__ import annotations

from ...runtime.requests.template_facts import TemplateFacts, probe_template, render
from .events import ContentDelta, Event, ReasoningDelta, ToolCall, merge_events
from .format import AnswerParser, CallSyntax, Format
from .registry import AnyFormat, reasoning_parsers, resolve, tool_parsers
from .tools import Tool, ToolChoice, check_tool_choice, check_tools

__all__ = [
    "AnswerParser",
    "AnyFormat",
    "CallSyntax",
    "ContentDelta",
    "Event",
    "Format",
    "ReasoningDelta",
    "TemplateFacts",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "check_tool_choice",
    "check_tools",
    "merge_events",
    "probe_template",
    "reasoning_parsers",
    "render",
    "resolve",
    "tool_parsers",
]

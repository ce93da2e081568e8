"""Selects a model's format: by name, from its tokenizer, or from its chat template's output."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from ...runtime.requests.special_tokens import special_tokens
from ...runtime.requests.template_facts import (
    PROBE_ARGUMENTS,
    PROBE_NAME,
    PROBE_TOOL,
    TemplateFacts,
    probe_template,
    template_source,
)
from .events import ContentDelta, ToolCall
from .families import (
    HARMONY,
    MISTRAL_ARRAY,
    REASONING_PARSER_ALIASES,
    REASONING_PARSERS,
    TOOL_PARSER_ALIASES,
    TOOL_PARSERS,
    hunyuan_syntax,
)
from .format import CallSyntax, Format
from .harmony import HARMONY_CALLS, HARMONY_REASONING, HarmonyFormat
from .library import TemplateFormat
from .parser import Parser, Reasoning
from .tools import Tool

logger = logging.getLogger(__name__)

AnyFormat: TypeAlias = Format | TemplateFormat

_PROBE = Tool(PROBE_NAME, PROBE_TOOL["function"]["parameters"], False, PROBE_TOOL)
_UNMARKED = ("llama3_json",)
"""Tried last: it has no mark of its own."""
_TELLING_MARKS: Mapping[str, tuple[str, ...]] = {
    HARMONY: ("<|channel|>commentary", "<|message|>"),
    "kimi_k2": ("<|tool_call_argument_begin|>",),
    "deepseek_v3": ("<｜tool▁sep｜>", "```json"),
    "deepseek_v31": ("<｜tool▁sep｜>",),
    "deepseek_v32": ("DSML", "function_calls"),
    "deepseek_v4": ("DSML", "tool_calls"),
    "minimax_m3": ("]<]minimax[>[",),
    "minimax_m2": ("<minimax:tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "lfm2": ("<|tool_call_start|>",),
    "hy_v3": ("<tool_sep",),
    "glm47": ("<arg_key>",),
    "qwen3_coder": ("<function=", "<parameter="),
    "phi4_mini_json": ("functools[",),
    "hermes": ("<tool_call>",),
    "granite": ("<|tool_call|>",),
}
"""Texts that identify a template's format if it writes no call of the probe; the first match counts."""
_MAX_PROBED = 20_000


def tool_parsers() -> list[str]:
    """Names that ``--tool-call-parser`` accepts, in addition to ``"none"``."""
    return sorted([*TOOL_PARSERS, *TOOL_PARSER_ALIASES])


def reasoning_parsers() -> list[str]:
    """Names that ``--reasoning-parser`` accepts, in addition to ``"none"``."""
    return sorted([*REASONING_PARSERS, *REASONING_PARSER_ALIASES])


def resolve(
    tool_parser: str | None,
    tokenizer: Any,
    chat_template: str | None = None,
    *,
    reasoning_parser: str | None = None,
    facts: TemplateFacts | None = None,
) -> AnyFormat | None:
    """The format of a model's output; None if neither calls nor reasoning are known.

    Without names, a tokenizer's own ``response_template`` comes first; then every parser is tried on the call that
    the chat template writes, and the template is searched for marks of reasoning.

    Args:
        tool_parser: one of ``tool_parsers()``, ``"none"``, or None: detect it.
        tokenizer: the model's tokenizer.
        chat_template: replaces the tokenizer's.
        reasoning_parser: one of ``reasoning_parsers()``, ``"none"``, or None: detect it.
        facts: known facts about the chat template.

    Raises:
        ValueError: unknown parser name.
    """
    calls = _named(tool_parser, TOOL_PARSERS, TOOL_PARSER_ALIASES, "--tool-call-parser")
    reasoning = _named(reasoning_parser, REASONING_PARSERS, REASONING_PARSER_ALIASES, "--reasoning-parser")
    own = getattr(tokenizer, "response_template", None)
    if tool_parser is None and reasoning_parser is None and isinstance(own, Mapping):
        try:
            return TemplateFormat(own)
        except ValueError as error:
            logger.warning("%s; detecting the format from the chat template", error)
    facts = facts or probe_template(tokenizer, chat_template)
    source = template_source(tokenizer, chat_template)
    added = _added_tokens(tokenizer)
    name = TOOL_PARSER_ALIASES.get(tool_parser or "", tool_parser)
    if tool_parser is None:
        name = _written_by(facts, added, source)
        calls = TOOL_PARSERS[name] if name else None
    calls = _adapted(name, calls, added, source)
    if reasoning_parser is None:
        reasoning = _reasoning_of(name if calls else None, source, added)
    if calls is None and reasoning is None:
        return None
    if (calls is HARMONY_CALLS) != (reasoning is HARMONY_REASONING) and calls is not None and reasoning is not None:
        raise ValueError(
            f"--tool-call-parser {name} and --reasoning-parser {reasoning_parser or 'of the chat template'} do not "
            f"read the same text; use {HARMONY} for both, or none for one of them"
        )
    kind = HarmonyFormat if HARMONY_CALLS is calls or HARMONY_REASONING is reasoning else Format
    return kind(
        name=(tool_parser or name if calls else None) or reasoning_parser or "reasoning",
        calls=calls,
        reasoning=reasoning,
        answer_begins=_answer_begins(facts, reasoning),
        special_tokens=special_tokens(tokenizer),
        added_tokens=added,
    )


def _named(name: str | None, table: Mapping[str, Any], aliases: Mapping[str, str], flag: str) -> Any:
    if name is None or name == "none":
        return None
    if name not in table and name not in aliases:
        raise ValueError(f"{flag} {name} is not known; use one of {', '.join(sorted([*table, *aliases]))} or none")
    return table[aliases.get(name, name)]


def _written_by(facts: TemplateFacts, added: Mapping[str, int], source: str) -> str | None:
    """The tool parser that reads the chat template's call, or whose marks the template contains."""
    call = facts.call if facts.call is not None and len(facts.call) <= _MAX_PROBED else ""
    for name in sorted(TOOL_PARSERS, key=lambda name: name in _UNMARKED):
        calls = _adapted(name, TOOL_PARSERS[name], added, source)
        assert calls is not None
        if (name != "glm45" or f"{PROBE_NAME}\n" in call) and _reads(calls, call, name in _UNMARKED):
            return name
    for name, marks in _TELLING_MARKS.items():
        if all(mark in source for mark in marks):
            return name
    return None


def _reads(calls: CallSyntax, text: str, unmarked: bool) -> bool:
    """Whether the text, from one of the marks on, is exactly a call of the probe."""
    marks = calls.marks
    wanted = (*marks.open, *(marks.open_at_start if unmarked else ()))
    starts = [found.start() for mark in wanted for found in re.finditer(re.escape(mark), text)]
    for start in sorted(starts)[:8]:
        parser = Parser(None, marks, [_PROBE])
        events = [*parser.feed(text[start:]), *parser.finish()]
        called = [(event.name, event.arguments) for event in events if isinstance(event, ToolCall)]
        rest = "".join(event.text for event in events if isinstance(event, ContentDelta))
        if called == [(PROBE_NAME, json.dumps(PROBE_ARGUMENTS))] and "tool_call" not in rest:
            return True
    return False


def _adapted(name: str | None, calls: CallSyntax | None, added: Mapping[str, int], source: str) -> CallSyntax | None:
    """The syntax of this very model, if a family has several."""
    if calls is not None and name == "mistral" and "[ARGS]" not in added and "[ARGS]" not in source:
        return MISTRAL_ARRAY
    if calls is not None and name == "hy_v3":
        found = re.search(r"<tool_calls(:[\w-]{1,32})>", " ".join([*added, source]))
        return hunyuan_syntax(found[1]) if found else calls
    return calls


def _reasoning_of(name: str | None, source: str, added: Mapping[str, int]) -> Reasoning | None:
    """The marks of reasoning in the chat template or the vocabulary, the family's own first."""
    own = REASONING_PARSER_ALIASES.get(name or "", name or "")
    if own == HARMONY:
        return HARMONY_REASONING
    candidates = [REASONING_PARSERS[own]] if own in REASONING_PARSERS else []
    if not candidates or not name:
        candidates += [REASONING_PARSERS[other] for other in (HARMONY, "qwen3", "mistral", "gemma4", "minimax_m3")]
    for reasoning in candidates:
        if any(mark.strip() in source for mark in (*reasoning.open, *reasoning.close)):
            return reasoning
        if reasoning.open[0].strip() in added and reasoning.close[0].strip() in added:
            return reasoning
    return None


def _answer_begins(facts: TemplateFacts, reasoning: Reasoning | None) -> str:
    """The generation prompt up to the marks of reasoning in it."""
    prompt = facts.generation_prompt
    for mark in (*reasoning.open, *reasoning.close) if reasoning else ():
        prompt = prompt.partition(mark.rstrip())[0]
    return prompt.rstrip()


def _added_tokens(tokenizer: Any) -> dict[str, int]:
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: int(token_id) for token_id, token in decoder.items() if token.content}

"""What of a conversation a chat template shows to the model, found by rendering one of the same shape.

Templates leave out what they have no place for: tools, a system's message behind the first, a tool's result. Texts of
the conversation itself do not tell, as templates trim and rewrite them; so a conversation of marked texts is rendered
in its place, once for each shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from .template_facts import PROBE_NAME, PROBE_TOOL, TemplateFacts, probe_template, try_render

_MOST_TEMPLATES = 16
"""Of a tokenizer that are remembered."""
_MOST_VIEWS = 256
"""Shapes of conversations that are remembered for a template."""
_LARGEST_SHAPE = 4000
"""Characters of a shape that is remembered."""


@dataclass
class Template:
    """A tokenizer's chat template, with what was found out about it.

    Attributes:
        facts: about it.
        hidden: by the shape of a conversation, what of it is not shown.
    """

    facts: TemplateFacts
    hidden: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


_TEMPLATES: WeakKeyDictionary[Any, dict[str, Template]] = WeakKeyDictionary()


def known_template(tokenizer: Any, chat_template: str) -> Template:
    """What is known of a template, probed at the first call.

    Args:
        tokenizer: whose template it is.
        chat_template: its text.
    """
    known = _TEMPLATES.setdefault(tokenizer, {})
    found = known.get(chat_template)
    if found is None:
        found = Template(probe_template(tokenizer, chat_template))
        _remember(known, chat_template, found, _MOST_TEMPLATES)
    return found


def hidden_parts(
    template: Template, tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> list[tuple[int, str]]:
    """What the template leaves out: "content" or "tool_calls" of a message by its index; -1: "tools", "documents".

    Content beside calls, and earlier reasoning, are the template's own to leave out.

    Args:
        template: see ``known_template``.
        tokenizer: whose template it is.
        messages: as the template takes them.
        arguments: that ``apply_chat_template`` gets.
    """
    ids: dict[str, str] = {}
    marked = [_marked(message, index, ids) for index, message in enumerate(messages)]
    options = {**arguments, "continue_final_message": False}
    if options["tools"]:
        options["tools"] = [PROBE_TOOL if "function" in options["tools"][0] else PROBE_TOOL["function"]]
    if options.get("documents"):
        options["documents"] = [dict.fromkeys(document, "d0z") for document in options["documents"]]
    shape = repr((marked, {**options, "chat_template": None}))
    hidden = template.hidden.get(shape)
    if hidden is None:
        text = try_render(tokenizer, marked, **options)
        hidden = [] if text is None else _missing(text, marked, options)
        if len(shape) <= _LARGEST_SHAPE:
            _remember(template.hidden, shape, hidden, _MOST_VIEWS)
    return hidden


def _marked(message: Mapping[str, Any], index: int, ids: dict[str, str]) -> dict[str, Any]:
    """The message with texts that tell where they come from."""
    marked: dict[str, Any] = {"role": message["role"], "content": _marked_content(message["content"], f"q{index}z")}
    marked |= {name: "thought" for name in ("reasoning_content", "reasoning", "thinking") if message.get(name)}
    if "name" in message:
        marked["name"] = "name"
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, f"f{index}x{j}z", ids) for j, call in enumerate(calls)]
    if "tool_call_id" in message:
        marked["tool_call_id"] = _marked_id(message["tool_call_id"], ids)
    return marked


def _marked_id(call_id: str, ids: dict[str, str]) -> str:
    return ids.setdefault(call_id, f"{len(ids):09}")


def _marked_content(content: Any, mark: str) -> Any:
    if isinstance(content, str):
        return mark if content.strip() else content
    return [{"type": "text", "text": mark}, *({"type": "text", "text": "more"} for _ in content[1:])]


def _marked_call(call: Mapping[str, Any], mark: str, ids: dict[str, str]) -> dict[str, Any]:
    is_text = isinstance(call["function"]["arguments"], str)
    arguments = f'{{"key": "v{mark}"}}' if is_text else {"key": f"v{mark}"}
    return {"id": _marked_id(call["id"], ids), "type": "function", "function": {"name": mark, "arguments": arguments}}


def _missing(text: str, marked: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[tuple[int, str]]:
    marks = {"tools": PROBE_NAME, "documents": "d0z"}
    missing = [(-1, name) for name, mark in marks.items() if options.get(name) and mark not in text]
    for index, message in enumerate(marked):
        calls = message.get("tool_calls", ())
        for call in calls:
            name = call["function"]["name"]
            if name not in text or f"v{name}" not in text:
                missing.append((index, "tool_calls"))
                break
        content = message["content"]
        mark = content if isinstance(content, str) else content[0]["text"]
        if not calls and mark not in text:
            missing.append((index, "content"))
    return missing


def _remember(known: dict[str, Any], key: str, value: Any, most: int) -> None:
    for oldest in list(known)[: max(0, len(known) - most + 1)]:  # in one step, as a thread renders, too
        known.pop(oldest, None)
    known[key] = value

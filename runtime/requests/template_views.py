"""Finds parts of a conversation that a chat template does not show to the model.

Templates silently drop parts that they do not support: tools, a second system message, a tool's result. Searching
the prompt for the conversation's own texts is unreliable, because templates trim and rewrite them; so a conversation
of the same shape with marked texts is rendered instead, once for each shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from .template_facts import PROBE_NAME, PROBE_TOOL, TemplateFacts, probe_template, try_render

_MOST_TEMPLATES = 16
"""Most templates remembered for a tokenizer."""
_MOST_VIEWS = 256
"""Most conversation shapes remembered for a template."""
_LARGEST_SHAPE = 4000
"""Most characters of a remembered shape."""


@dataclass
class Template:
    """A tokenizer's chat template and the results of probing it.

    Attributes:
        facts: facts about the template.
        hidden: by the shape of a conversation, the parts that the template does not show.
    """

    facts: TemplateFacts
    hidden: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


_TEMPLATES: WeakKeyDictionary[Any, dict[str, Template]] = WeakKeyDictionary()


def known_template(tokenizer: Any, chat_template: str) -> Template:
    """Return a template with its facts; the first call for a template probes it.

    Args:
        tokenizer: tokenizer with the template.
        chat_template: text of the template.
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
    """Return the parts left out: "content" or "tool_calls" by message index; "tools" or "documents" with index -1.

    The template is free to leave out content next to calls, and earlier reasoning.

    Args:
        template: the result of ``known_template``.
        tokenizer: tokenizer with the template.
        messages: messages in the form that the template takes.
        arguments: arguments of ``apply_chat_template``.
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
    """Return the message with its texts replaced by marks that identify them."""
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
    for oldest in list(known)[: max(0, len(known) - most + 1)]:  # in one step, because a thread renders, too
        known.pop(oldest, None)
    known[key] = value

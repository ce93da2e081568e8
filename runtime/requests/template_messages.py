"""Converts messages to the form that a model's chat template accepts.

Clients send one form; templates differ in what they accept: text or parts, arguments as objects or as JSON text, the
role ``developer`` or not, ids of any length or of nine characters. This module converts a form that the template does
not accept to one that it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from .checks import shown
from .template_facts import TemplateFacts

MAX_TOOL_CALLS = 512
MAX_ARGUMENTS_DEPTH = 128

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts → the field with the text."""
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_SHORT_ID = re.compile("[0-9A-Za-z]{9}")


class ConversationError(ValueError):
    """A conversation that cannot be rendered.

    Args:
        field: field of the request, as the client wrote it.
        text: error message with the field, the value and the remedy.
    """

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def template_messages(messages: Sequence[Any], facts: TemplateFacts, places: Sequence[str]) -> list[dict[str, Any]]:
    """Check the messages of a conversation and convert them to the form that the template accepts.

    Null content becomes an empty text. Several text parts stay parts if the template accepts them; otherwise they are
    joined by line breaks. A single part becomes a text. Reasoning is passed under every name that templates read.
    Arguments of an earlier call that are not a JSON object, as a model may have written them, become ``{}``, or stay
    unchanged if the template takes text. A tool's message gets the name of the function that its ``tool_call_id``
    belongs to. Calls that the template leaves out are appended to the content as JSON text. Null fields and empty
    ``tool_calls`` are dropped.

    Args:
        messages: messages in OpenAI's form.
        facts: facts about the template.
        places: names of the messages in errors.

    Raises:
        ConversationError: ``messages`` are not a valid conversation.
    """
    names: dict[str, str] = {}  # function names by call id
    return [_message(message, place, facts, names) for message, place in zip(messages, places, strict=True)]


def _message(message: Any, place: str, facts: TemplateFacts, names: dict[str, str]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        text = f"{place}={shown(message)} is not a message; use {{'role': 'user', 'content': 'Hello'}}"
        raise ConversationError(place, text)
    role = "system" if role == "developer" and not facts.knows_developer else role
    out = {key: value for key, value in message.items() if value is not None}
    content = out.get("content", out.get("refusal"))
    if content is None and role not in ("assistant", "tool"):
        raise _wrong(f"{place}.content", "is missing; send text, or parts of type 'text'")
    out |= {"role": role, "content": _content(content, role, f"{place}.content", facts)}
    if role == "assistant":
        out |= _reasoning(out, place)
    if calls := out.pop("tool_calls", None):
        called = _tool_calls(calls, f"{place}.tool_calls", facts, names)
        out |= {"content": _with_calls(out["content"], called)} if facts.hides_calls else {"tool_calls": called}
    if role == "tool":
        call_id = out.get("tool_call_id", "")
        if not isinstance(call_id, str):
            raise _wrong(f"{place}.tool_call_id", "is not a string; send the id of the call that this answers")
        out["tool_call_id"] = _call_id(call_id, facts)
        if call_id in names:
            out.setdefault("name", names[call_id])
    return out


def _reasoning(message: Mapping[str, Any], place: str) -> dict[str, str]:
    for field in _REASONING_FIELDS:
        if (reasoning := message.get(field)) is not None:
            if not isinstance(reasoning, str):
                raise _wrong(f"{place}.{field}", "is not a string")
            return dict.fromkeys(_REASONING_FIELDS, reasoning)
    return {}


def _content(content: Any, role: str, place: str, facts: TemplateFacts) -> str | list[dict[str, str]]:
    if isinstance(content, list | tuple):
        texts = [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]
        if not texts and role not in ("assistant", "tool"):
            raise _wrong(place, "has no parts; send text, or parts of type 'text'")
        if len(texts) > 1 and role in facts.takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        content = "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise ConversationError(place, f"{place}={shown(content)} is neither text nor a list of parts; send a string")
    text = content or ""
    return [{"type": "text", "text": text}] if role in facts.refuses_text else text


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise _wrong(place, f"has the unsupported type {shown(kind)}; send text parts only")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        text = f"{place}.{_TEXT_PARTS[kind]}={shown(text)} is not a string; send a string"
        raise ConversationError(f"{place}.{_TEXT_PARTS[kind]}", text)
    return text


def _tool_calls(calls: Any, place: str, facts: TemplateFacts, names: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple) or len(calls) > MAX_TOOL_CALLS:
        raise _wrong(place, f"is not a list of at most {MAX_TOOL_CALLS} calls")
    return [_tool_call(call, f"{place}[{index}]", facts, names) for index, call in enumerate(calls)]


def _with_calls(content: str | list[dict[str, str]], calls: Sequence[Mapping[str, Any]]) -> Any:
    """Return the content followed by its calls."""
    text = json.dumps([call["function"] for call in calls], ensure_ascii=False)
    if isinstance(content, str):
        return f"{content}\n{text}" if content else text
    return [*(part for part in content if part["text"]), {"type": "text", "text": text}]


def _tool_call(call: Any, place: str, facts: TemplateFacts, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(place, "is not a call; use {'id': ..., 'type': 'function', 'function': {'name': ...}}")
    call_id = call.get("id") or ""
    if not isinstance(call_id, str):
        raise _wrong(f"{place}.id", "is not a string")
    names[call_id] = function["name"]
    arguments = _arguments(function.get("arguments"), facts.arguments_as_text)
    return {
        "id": _call_id(call_id, facts),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _call_id(call_id: str, facts: TemplateFacts) -> str:
    """Return the id, or nine characters derived from it if the template accepts no others."""
    if not facts.short_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


def _arguments(arguments: Any, as_text: bool) -> Any:
    """Return a call's arguments in the form that the template takes; clients send JSON text, some an object."""
    if as_text and isinstance(arguments, str) and arguments.strip():
        return arguments
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = {}
    if not isinstance(value, Mapping) or _is_deep(value):
        value = {}
    return json.dumps(value, ensure_ascii=False) if as_text else value


def _is_deep(value: Any) -> bool:
    level: Sequence[Any] = [value]
    for _ in range(MAX_ARGUMENTS_DEPTH):
        parents = [entry for entry in level if isinstance(entry, Mapping | list | tuple)]
        if not parents:
            return False
        level = [
            child for parent in parents for child in (parent.values() if isinstance(parent, Mapping) else parent)
        ]
    return True


def _wrong(place: str, text: str) -> ConversationError:
    return ConversationError(place, f"{place} {text}")

"""Messages of a chat request as a model's chat template takes them.

Clients send one form; templates differ in what they take: text or parts, arguments as objects or as JSON text, the
role ``developer`` or not. What the template does not take is turned into what it does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .templates import TemplateFacts

MAX_MESSAGES = 10_000
MAX_TOOL_CALLS = 512
MAX_ARGUMENTS_DEPTH = 128
ROLES = ("system", "developer", "user", "assistant", "tool")

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def template_messages(messages: Any, facts: TemplateFacts) -> list[dict[str, Any]]:
    """The messages of a request, checked and turned into those that the template takes.

    Content parts of type ``text`` are kept where the template takes parts, and otherwise joined by line breaks.
    Reasoning is passed under every name that templates read. A tool message gets the name of the function that its
    ``tool_call_id`` belongs to.

    Args:
        messages: the field as it came.
        facts: about the template.

    Raises:
        ValueError: they are no conversation; the message names the place.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is no array of messages; pass [{'role': 'user', 'content': 'Hello'}]")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"messages has {len(messages)} entries; pass at most {MAX_MESSAGES}")
    names: dict[str, str] = {}  # of functions, by the id of the call
    return [_message(message, f"messages[{index}]", facts, names) for index, message in enumerate(messages)]


def _message(message: Any, place: str, facts: TemplateFacts, names: dict[str, str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} is no object; use {{'role': 'user', 'content': 'Hello'}}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{place}.role={_short(role)} is not known; use one of {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": "system" if role == "developer" and not facts.knows_developer else role}
    calls = message.get("tool_calls")
    if message.get("content") is None and role not in ("assistant", "tool"):
        raise ValueError(f"{place}.content is missing; pass text, or parts of type 'text'")
    out["content"] = _content(message.get("content"), f"{place}.content", facts)
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    if role == "assistant":
        reasoning = next((message[field] for field in _REASONING_FIELDS if message.get(field) is not None), None)
        if reasoning is not None and not isinstance(reasoning, str):
            raise ValueError(f"{place}.reasoning_content is no string")
        if reasoning:
            out |= dict.fromkeys(_REASONING_FIELDS, reasoning)
        if calls is not None:
            out["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls", facts, names)
        if not out.get("tool_calls", True):
            del out["tool_calls"]
    if role == "tool":
        call_id = message.get("tool_call_id")
        if call_id is not None and not isinstance(call_id, str):
            raise ValueError(f"{place}.tool_call_id is no string; pass the id of the call that this answers")
        out["tool_call_id"] = call_id or ""
        if "name" not in out and call_id in names:
            out["name"] = names[call_id]
    return out


def _content(content: Any, place: str, facts: TemplateFacts) -> str | list[dict[str, str]]:
    if content is None:
        content = ""
    if isinstance(content, str):
        return content if facts.takes_text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"{place} is neither text nor an array of parts; use a string")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif (
            isinstance(part, Mapping)
            and part.get("type") in ("text", "input_text", "output_text", "refusal")
            and isinstance(text := part.get("refusal" if part["type"] == "refusal" else "text"), str)
        ):
            texts.append(text)
        else:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"{place}[{index}] of type {_short(kind)} is not served; leave text parts only")
    if facts.takes_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _tool_calls(calls: Any, place: str, facts: TemplateFacts, names: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        raise ValueError(f"{place} is no array of at most {MAX_TOOL_CALLS} calls")
    return [_tool_call(call, f"{place}[{index}]", facts, names) for index, call in enumerate(calls)]


def _tool_call(call: Any, place: str, facts: TemplateFacts, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} is no call; use {{'id': ..., 'type': 'function', 'function': {{'name': ...}}}}")
    call_id = call.get("id", "")
    if not isinstance(call_id, str):
        raise ValueError(f"{place}.id is no string")
    names[call_id] = function["name"]
    arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
    written = json.dumps(arguments, ensure_ascii=False) if facts.arguments_as_text else arguments
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": written}}


def _arguments(arguments: Any, place: str) -> Mapping[str, Any]:
    """The arguments as an object; clients send JSON text, some an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is no JSON text; pass what the call had") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{place} is no JSON object; pass what the call had")
    _check_depth(arguments, place)
    return arguments


def _check_depth(value: Any, place: str) -> None:
    level: Sequence[Any] = [value]
    for _ in range(MAX_ARGUMENTS_DEPTH):
        parents = [entry for entry in level if isinstance(entry, dict | list)]
        if not parents:
            return
        level = [child for parent in parents for child in (parent.values() if isinstance(parent, dict) else parent)]
    raise ValueError(f"{place} is nested deeper than {MAX_ARGUMENTS_DEPTH} levels")


def _short(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float | None) else type(value).__name__

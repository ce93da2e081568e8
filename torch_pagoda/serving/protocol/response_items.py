"""Converts the input of ``/v1/responses`` to the messages and fields of a chat request."""

from __future__ import annotations

from typing import Any

from ...runtime.requests.checks import shown
from ..http.errors import refuse

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of text parts → the field with the text."""

_ROLES = ("user", "assistant", "system", "developer")


def input_messages(value: Any, instructions: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages of the field ``input``, and the field name of each.

    The model's reasoning, text and calls in one turn are one message.

    Args:
        value: a text, or items.
        instructions: become the first message, the system's.

    Raises:
        ApiError: 400; an item or a part of one is unsupported or malformed.
    """
    if not value or not isinstance(value, str | list):
        refuse("input", f"input={shown(value)} is not an input; send text or a list of items")
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
        places.append("instructions")
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}], [*places, "input"]
    for i, item in enumerate(value):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            refuse(where, f"{where}={shown(item)} is not an item; send an object with type or role")
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            _of_assistant(messages).setdefault("reasoning_content", []).append(_reasoning(item, where))
        elif kind == "function_call":
            _of_assistant(messages).setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            call_id = _text(item, "call_id", where)
            content = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            refuse(
                f"{where}.type",
                f"{where}.type={shown(kind)} is not supported; send messages, reasoning, function_call and "
                "function_call_output",
                "unsupported_parameter",
            )
        places += [where] * (len(messages) - len(places))
    for message in messages:
        if "reasoning_content" in message:  # what was thought in one turn
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages, places


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the form of chat requests.

    Raises:
        ApiError: 400; one is not a function.
    """
    found = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            text = f"tools[{i}].type={shown(tool.get('type'))} is not supported; send tools of type 'function'"
            refuse(f"tools[{i}].type", text, "unsupported_parameter")
        fields = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in fields if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def chat_tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """``tool_choice`` in the form of chat requests."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": {key: choice[key] for key in choice if key != "type"}}
    return choice


def response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as ``response_format`` of chat requests.

    Raises:
        ApiError: 400.
    """
    asked = (text or {}).get("format")
    if asked is None:
        return None
    if not isinstance(asked, dict):
        refuse("text.format", f"text.format={shown(asked)} is not an object; send {{'type': 'json_schema', ...}}")
    kind = asked.get("type")
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        refuse(
            "text.format.type", f"text.format.type={shown(kind)} is not supported; use text, json_object, json_schema"
        )
    if not isinstance(asked.get("schema"), dict):
        refuse("text.format.schema", "text.format.schema is missing; send a JSON schema")
    return {"type": kind, "json_schema": {key: asked[key] for key in asked if key != "type"}}


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        refuse(f"{where}.role", f"{where}.role={shown(role)} is not known; use one of {', '.join(_ROLES)}")
    content = _content(item.get("content"), f"{where}.content")
    if role != "assistant":
        messages.append({"role": role, "content": content})
        return
    _of_assistant(messages)["content"] += content


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant's current turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _content(value: Any, where: str) -> list[str]:
    """Texts of content."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        refuse(where, f"{where}={shown(value)} is not content; send text or a list of parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            text = f"{where}[{i}].type={shown(kind)} is not supported; send parts of type 'input_text'"
            refuse(f"{where}[{i}].type", text, "unsupported_parameter")
        texts.append(_text(part, _TEXT_PARTS[kind], f"{where}[{i}]"))
    return texts


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Text of a reasoning item; else its summary."""
    for field in ("content", "summary"):
        parts = item.get(field) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            refuse(f"{where}.{field}", f"{where}.{field}={shown(parts)} is not a list of parts; omit it")
        if parts:
            return "\n".join(_text(part, "text", f"{where}.{field}[{i}]") for i, part in enumerate(parts))
    return ""


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {name: _text(item, name, where) for name in ("name", "arguments")}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _text(value: dict[str, Any], name: str, where: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        refuse(f"{where}.{name}", f"{where}.{name}={shown(found)} is not a string; send a string")
    return found
